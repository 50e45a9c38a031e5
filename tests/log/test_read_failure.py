"""A disk that refuses to give back what it holds: final, and nothing is lost by it."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.log.disk import RealFile
from penstock.log.errors import LogFailed
from penstock.log.log import Log, open_log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome

NOW = 1_700_000_000_000_000
SETTINGS = LogSettings(cache_bytes=0, block_bytes=1000)


POLICIES = Policies({"q": {"max-deliveries": 1, "max-bytes": 1 << 20}})

CALLS: dict[str, Callable[[Log], object]] = {
    "take": lambda engine: engine.take("q", "worker", 5, NOW),
    "requeue": lambda engine: engine.settle("q", "early", Outcome.REQUEUE, [(0, 3)], NOW),
    "give back": lambda engine: engine.give_back("q", "early", NOW),
    "append": lambda engine: engine.append("q", Batch.of([b"more"]), NOW),
    "transact": lambda engine: engine.transact("key", [("q", Batch.of([b"more"]))], NOW),
    "describe": lambda engine: engine.describe("q"),
    "read": lambda engine: list(engine.read("q", 0, 20)),
    "events": lambda engine: list(engine.events("q", 0, 20)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_read_that_fails_is_final_and_loses_nothing(
    call: Callable[[Log], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_log(str(tmp_path), NOW, settings=SETTINGS, policies=POLICIES)
    messages = [b"%04d" % number * 100 for number in range(20)]
    engine.append("q", Batch.of(messages), NOW)
    engine.flush(NOW)
    engine.wait()
    engine.close(NOW)
    engine = open_log(str(tmp_path), NOW, settings=SETTINGS, policies=POLICIES)
    engine.take("q", "early", 3, NOW)
    engine.take("q", "other", 10, NOW)  # so that the cache has another block
    engine.settle("q", "other", Outcome.ACK, [(3, 4)], NOW)  # so that to weigh the others takes a look
    engine.flush(NOW)
    engine.wait()

    def refuse(self: RealFile, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "read", refuse)
        with pytest.raises(LogFailed, match="the disk does not answer"):
            call(engine)
        with pytest.raises(LogFailed):
            engine.append("q", Batch.of([b"more"]), NOW)
        engine.close(NOW)
    engine = open_log(str(tmp_path), NOW, settings=SETTINGS)
    taken = [message for piece in engine.take("q", "worker", 100, NOW) for message in piece.messages()]
    assert taken == messages[:3] + messages[4:]
    assert not engine.damage
    engine.close(NOW)


def test_a_segment_goes_though_the_disk_does_not_give_back_what_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LogSettings(segment_bytes=4096, cache_bytes=0, block_bytes=1000)
    policies = Policies({"q": {"retention-seconds": 0}})
    engine = open_log(str(tmp_path), NOW, settings=settings, policies=policies)
    for number in range(30):
        engine.append("q", Batch.of([b"%04d" % number * 50] * 4), NOW)
        engine.flush(NOW)
        engine.wait()
    engine.take("q", "worker", 110, NOW)
    for odd in (1, 0):
        engine.describe("q")  # How large those are that end now is to be looked up.
        engine.settle("q", "worker", Outcome.ACK, [(at, at + 1) for at in range(odd, 110, 2)], NOW)
        engine.flush(NOW)
        engine.wait()
    segments = engine.info().segments

    def refuse(self: RealFile, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "read", refuse)
        engine.trim(NOW + 1)
        engine.wait()
        assert engine.info().segments < segments
    engine.close(NOW)
    engine = open_log(str(tmp_path), NOW, settings=settings, policies=policies)
    assert engine.describe("q").bytes == 10 * 200
    assert not engine.damage
    engine.close(NOW)
