"""The streams of a cluster as the target of a restore: disks on which the embedded log's files become
records.

The streams must be empty, or hold what an earlier call has left (`log/backup/restoring.py` looks). Front-ends
may run meanwhile: as long as the restore is not finished none of them opens a log, and then they lead them.
The folder is the copy of the front-end that is started on it next.

A cluster has as many logs as its backup, for the hash of a queue's name says in which one it is. A new one
gets that number here, when all its logs are marked as not restored: whoever comes then finds none to open.
"""

import contextlib
import secrets
from collections.abc import Iterator, Sequence

from penstock.cluster.election import has_one_log, shards_found, shards_of
from penstock.cluster.nodes import servers_of, wire_options
from penstock.common.given import SettingsError
from penstock.log.backup.restoring import Plan, begin
from penstock.log.disk import RealDisk
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.disk import StreamDisk
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import Replica
from penstock.log.jetstream.stream_log import make_missing
from penstock.server.settings import Settings


@contextlib.contextmanager
def restored_streams(
    settings: Settings, plans: Sequence[Plan]
) -> Iterator[Sequence[tuple[Plan, StreamDisk]]]:
    """What is to be filled and finished, as long as this goes on; what was written there when it ends well is
    the front-end's copy."""
    names = LogNames(settings.cluster.name)
    try:
        nats = LinkThread.open(servers_of(settings), wire_options(settings.cluster))
    except JetStreamTrouble as error:
        raise SettingsError(f"engine: {error}") from None
    own = RealDisk(settings.data)
    own.lock()
    try:
        found = nats.ask(shards_found(nats.api, names)) or (
            1 if nats.ask(has_one_log(nats.api, names)) else None
        )
        _must_be(len(plans), found or settings.cluster.shards, names)
        with contextlib.ExitStack() as stack:
            replicas = settings.cluster.replicas
            shards = names.of_shards(len(plans))
            nats.ask(make_missing(nats, [it.stream_settings(replicas) for it in shards]))
            disks = [stack.enter_context(_disk(nats, it, settings.data)) for it in shards]
            left = begin(list(zip(plans, disks, strict=True)))
            nats.ask(make_missing(nats, names.cluster_settings(replicas)))
            _must_be(len(plans), nats.ask(shards_of(nats.api, names, len(plans))), names)
            yield left
    finally:
        own.unlock()
        nats.close()


def _must_be(logs: int, shards: int | None, names: LogNames) -> None:
    if shards not in (None, logs):
        raise SettingsError(
            f"cluster.shards: cluster {names.log} has {shards}, or is to have so many, and the backup has "
            f"{logs}: a queue would be in another log than its name says. Restore it into a new cluster, of "
            f"another name ([cluster] name), with shards = {logs}"
        )


@contextlib.contextmanager
def _disk(nats: LinkThread, names: LogNames, data: str) -> Iterator[StreamDisk]:
    replica = Replica(nats.api, names, names.folder(data))
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
