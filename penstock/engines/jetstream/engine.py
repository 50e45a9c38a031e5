"""The engine of a cluster: the embedded log, on a disk that is a stream.

Everything that an engine has to do, the embedded log does: the life of messages, events, dead letters,
transactions, readers, recovery. What is here is how such a log is opened by a broker that leads, from a
folder that is a cache (`replica.py`), with every write going to JetStream (`disk.py`, `appender.py`), and
how it is let go.

Opening waits for the cluster and reads what the folder lacks: it is for a thread that may wait. From then
on the engine belongs to the broker's loop, as always.

How it fails: `EngineFailed` where another broker has written meanwhile: bring the folder up to date and try
again, if it is still yours to lead. `JetStreamTrouble` where the cluster does not answer.
"""

import secrets
from collections.abc import Callable

from penstock.broker.policy import Policies
from penstock.engines.interface import EngineInfo
from penstock.engines.jetstream.appender import Appender
from penstock.engines.jetstream.disk import StreamDisk
from penstock.engines.jetstream.names import LogNames
from penstock.engines.jetstream.replica import Replica
from penstock.engines.jetstream.station import Station
from penstock.engines.log.engine import LogEngine
from penstock.engines.log.state import Damage, LogSettings
from penstock.engines.log.workers import ThreadWorker


class StreamEngine(LogEngine):
    """See the module's docstring. `open_stream_log` opens one."""

    _appender: Appender
    _replica: Replica
    _names: LogNames

    @property
    def seq_last(self) -> int:
        """The stream's last record, which is ours."""
        return self._appender.seq_last

    @property
    def trouble(self) -> str:
        """What the log waits for at this moment; empty: for nothing."""
        return self._appender.trouble

    def info(self) -> EngineInfo:
        info = super().info()
        info.engine = "jetstream"
        return info

    def close(self, now_us: int) -> None:
        """Store everything, and leave the folder as something to go on from."""
        super().close(now_us)
        self._appender.stop()
        if self.failed is None:
            self._replica.leave(self._appender.seq_last)

    def abandon(self) -> None:
        """Write nothing more. The folder may hold what the stream does not, so it is emptied."""
        self._appender.stop()
        super().abandon()
        self._replica.wipe()


async def make_streams(station: Station, names: LogNames, replicas: int) -> None:
    """The streams of a log, where they are not there yet."""
    there = set(await station.api.stream_names())
    for settings in (names.stream_settings(replicas), names.state_settings(replicas)):
        if settings["name"] not in there:
            await station.api.create_stream(settings)


def open_stream_log(
    station: Station,
    names: LogNames,
    replica: Replica,
    now_us: int,
    *,
    settings: LogSettings | None = None,
    policies: Policies | None = None,
    wake: Callable[[], None],
) -> StreamEngine:
    """Lead the log: everything that is in the stream is recovered, and whoever wrote it before writes no
    more."""

    async def catch_up() -> int:
        seq = await replica.catch_up()
        await replica.drop_removed()
        return seq

    seq_last = station.ask(catch_up())
    replica.set_watermark()
    appender = Appender(station, names, secrets.randbits(63), seq_last)
    disk = StreamDisk(replica.path, appender, replica.index)
    try:
        engine = StreamEngine.open(
            disk,
            now_us,
            settings=settings,
            policies=policies,
            writer=ThreadWorker("penstock-writer", wake),
            keeper=ThreadWorker("penstock-keeper", wake),
        )
    except BaseException:
        # What it wrote before it failed may be here and not there.
        replica.wipe()
        raise
    assert isinstance(engine, StreamEngine)
    engine._appender = appender
    engine._replica = replica
    engine._names = names
    for text in replica.reports:
        engine.report_damage(Damage(f"stream {names.stream}", 0, "", 0, 0, text))
    return engine
