"""The log of a cluster: the embedded log, on a disk that is a stream.

Everything that a log has to do, the embedded one does: the life of messages, events, dead letters,
transactions, readers, recovery. What is here is how such a log is opened by a broker that leads, from a
folder that is a cache (`replica.py`), with every write going to JetStream (`disk.py`, `appender.py`), and
how it is let go.

Opening waits for the cluster and reads what the folder lacks: it is for a thread that may wait. From then
on the log belongs to the broker's loop, as always.

How it fails: `LogFailed` where another broker has written meanwhile: bring the folder up to date and try
again, if it is still yours to lead. `JetStreamTrouble` where the cluster does not answer.
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import Any

from penstock.log.errors import LogFailed, LogInUse
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.disk import StreamDisk
from penstock.log.jetstream.errors import JetStreamError, JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import Replica
from penstock.log.jetstream.room import Room
from penstock.log.log import Log
from penstock.log.segment import parse_segment_name
from penstock.log.state import Damage, LogSettings
from penstock.log.workers import ThreadWorker
from penstock.model.policy import Policies


class StreamLog:
    """A log that this broker leads, and all that belongs to it. `open_stream_log` opens one.

    `log` is the embedded one, of which nothing is changed; it is ended here, and not by its own `close`.
    """

    def __init__(self, log: Log, appender: Appender, replica: Replica) -> None:
        self.log = log
        self.appender = appender
        self.replica = replica

    def close(self, now_us: int) -> None:
        """Store everything, and leave the folder as something to go on from.

        Where not everything could be stored, the folder has more than the stream: it is not gone on from.
        """
        self.log.close(now_us)
        self.appender.stop()
        if self.log.is_safe:
            self.replica.leave(self.appender.seq_last)

    def close_within(self, seconds: float, now_us: int) -> None:
        """The same; a cluster that has not stored the rest by then does not get it any more."""
        patience = threading.Timer(seconds, self.appender.stop)
        patience.start()
        try:
            self.close(now_us)
        finally:
            patience.cancel()
            patience.join()

    def reached(self) -> tuple[int, int]:
        """Of one that was let go of: before which position all is stored, and from which on nothing is. What
        is between may be stored or not."""
        stored, perhaps = map(_position, (self.appender.reached, self.appender.may_reach))
        return max(stored, self.log.synced), max(stored, perhaps, self.log.synced)

    def let_go(self) -> None:
        """Write nothing more but what is on its way, whose fate is known then: stored, or overtaken. For a
        thread that may wait for as long as the cluster does not answer, or until `appender.stop`."""
        self.log.abandon()
        self.abandon()

    def abandon(self) -> None:
        """Write nothing more. The folder may have what the stream does not: what both have is kept."""
        self.appender.stop()
        self.log.abandon()
        self.replica.fall_back()


def _position(place: tuple[str, int]) -> int:
    """In the log, of one in a file."""
    segment = parse_segment_name(place[0])
    return segment[0] + place[1] if segment is not None else 0


async def make_missing(nats: LinkThread, streams: Iterable[dict[str, Any]]) -> None:
    """Those that are not there yet. JSON: `Any`."""
    for settings in streams:
        try:
            await nats.api.stream(settings["name"])
        except JetStreamError as error:
            if not error.not_found:
                raise
            await nats.api.create_stream(settings)


def open_stream_log(
    nats: LinkThread,
    names: LogNames,
    replica: Replica,
    now_us: int,
    *,
    settings: LogSettings | None = None,
    policies: Policies | None = None,
    wake: Callable[[], None],
    room: Room | None = None,
) -> StreamLog:
    """Lead the log: everything that is in the stream is recovered, and whoever wrote it before writes no
    more."""

    seq_last = nats.ask(replica.complete())
    replica.set_watermark()
    unfinished = replica.unfinished()
    appender = Appender(nats, names, secrets.randbits(63), seq_last, replica.records, room)
    disk = StreamDisk(replica.path, appender, replica.index)
    try:
        log = Log.open(
            disk,
            now_us,
            settings=settings,
            policies=policies,
            writer=ThreadWorker("penstock-writer", wake),
            keeper=ThreadWorker("penstock-keeper", wake),
        )
    except LogInUse:
        raise  # the folder is somebody else's
    except BaseException:
        # What it wrote before it failed may be here and not there.
        appender.stop()
        replica.wipe()
        raise
    opened = StreamLog(log, appender, replica)
    try:
        disk.sync_names()  # of what recovery has renamed and removed, on this thread
        for name in unfinished:
            # Who began it is overtaken by now, and does not go on with it. We may have begun it anew.
            if not os.path.exists(disk.where(name)):
                appender.remove(name)
    except (OSError, JetStreamTrouble) as error:
        opened.abandon()
        raise LogFailed(f"the log in {replica.path} cannot be opened: {error}") from error
    log.cluster = dict  # nothing is known of it so far
    for text in replica.reports:
        log.report_damage(Damage(f"stream {names.stream}", 0, "", 0, 0, text))
    return opened
