"""A disk that refuses to give back what it holds: final, and nothing is lost by it."""

import errno
from pathlib import Path

import pytest

from penstock.log.disk import RealFile
from penstock.log.errors import LogFailed
from penstock.log.log import open_log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch

NOW = 1_700_000_000_000_000
SETTINGS = LogSettings(cache_bytes=0, block_bytes=1000)


def test_a_read_that_fails_is_final_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_log(str(tmp_path), NOW, settings=SETTINGS)
    messages = [b"%04d" % number * 100 for number in range(20)]
    engine.append("q", Batch.of(messages), NOW)
    engine.flush(NOW)
    engine.wait()
    engine.close(NOW)
    engine = open_log(str(tmp_path), NOW, settings=SETTINGS)

    def refuse(self: RealFile, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "read", refuse)
        with pytest.raises(LogFailed, match="the disk does not answer"):
            engine.take("q", "worker", 5, NOW)
        with pytest.raises(LogFailed):
            engine.append("q", Batch.of([b"more"]), NOW)
        engine.close(NOW)
    engine = open_log(str(tmp_path), NOW, settings=SETTINGS)
    taken = [message for piece in engine.take("q", "worker", 100, NOW) for message in piece.messages()]
    assert taken == messages
    assert not engine.damage
    engine.close(NOW)
