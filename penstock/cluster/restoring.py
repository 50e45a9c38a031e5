"""The stream of a cluster as the target of a restore: a disk on which the embedded log's files become
records.

The stream must be empty, or hold what an earlier call has left (`log/backup/restoring.py` looks). Front-ends
may run meanwhile: as long as the restore is not finished none of them opens the log, and then one of them
leads it. The folder is the copy of the front-end that is started on it next.
"""

import contextlib
import secrets
from collections.abc import Iterator

from penstock.cluster.election import shards_found
from penstock.cluster.nodes import servers_of, wire_options
from penstock.common.given import SettingsError
from penstock.log.disk import RealDisk
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.disk import StreamDisk
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import Replica
from penstock.log.jetstream.stream_log import make_streams
from penstock.server.settings import Settings


@contextlib.contextmanager
def restored_stream(settings: Settings) -> Iterator[StreamDisk]:
    """The disk, as long as this goes on; what was written to it when it ends well is the front-end's copy."""
    names = LogNames(settings.cluster.name)
    try:
        nats = LinkThread.open(servers_of(settings), wire_options(settings.cluster))
    except JetStreamTrouble as error:
        raise SettingsError(f"engine: {error}") from None
    own = RealDisk(settings.data)
    own.lock()
    try:
        shards = nats.ask(shards_found(nats.api, names)) or settings.cluster.shards or 1
        if shards > 1:
            raise SettingsError(
                f"cluster.shards: cluster {names.log} has {shards} logs, or is to have them, and a backup "
                f"is of one; name another cluster, [cluster] name"
            )
        nats.ask(make_streams(nats, names, settings.cluster.replicas))
        replica = Replica(nats.api, names, settings.data)
        nats.ask(replica.begin())
        last = nats.ask(replica.complete())
        appender = Appender(nats, names, secrets.randbits(63), last, replica.records)
        disk = StreamDisk(replica.path, appender, replica.index)
        disk.lock()
        try:
            yield disk
        finally:
            disk.unlock()
            appender.stop()
        replica.leave(appender.seq_last)
    finally:
        own.unlock()
        nats.close()
