"""What earlier versions kept in files beside the log is taken over, whenever somebody dies in between."""

import asyncio
import json
import logging
import os
import tarfile
from base64 import b64decode
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.stages import old
from penstock.log.reader import LogReader
from penstock.log.state import LogSettings
from tests.http.api import Api, Reply
from tests.http.conftest import StartBroker
from tests.http.stage_rig import WAIT_SECONDS, Died, Rig, every_moment
from tests.seeds import some
from tests.server.harness import ROOT, until

WRITTEN = ROOT / "tests" / "data" / "log-0.1.0"
EXPECTED: dict[str, Any] = json.loads((WRITTEN / "expected.json").read_text())
IDS: dict[str, list[str]] = {key: it["stages"] for key, it in EXPECTED.items() if key != "messages"}
LARGE = ("unmarked", "begun", "ended", "unbegun")
TTL = 315_360_000


def unpacked(folder: Path) -> Path:
    """A data folder as the earlier version has left it."""
    with tarfile.open(WRITTEN / "data.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder / "data"


def values(key: str, part: str) -> list[bytes]:
    return [f"{key}-{part}-{number:03d}".ljust(150, ".").encode() for number in range(60)]


def commit(api: Api, key: str, *stages: str) -> Reply:
    return api.ask("POST", "/v1/transactions", {"transaction": key, "stages": list(stages)})


def look(api: Api, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(f"/v1/queues/{queue}/messages", limit=1000)["messages"]
    return found


def payloads(api: Api, queue: str) -> list[bytes]:
    return [b64decode(it["value_base64"]) for it in look(api, queue)]


def test_a_folder_of_0_1_0(start_broker: StartBroker, tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    data = unpacked(tmp_path / "broker")
    broker = start_broker("--http-lease-seconds-max", "100")
    for end in (lambda: None, broker.kill, broker.stop):
        end()
        if not broker.running:
            broker.start()
        with Api(broker.ports["http"]) as api:
            check_what_had_begun(api)
            check_what_was_there(api)
            until(lambda: not (data / "stages").exists(), "the folder to go")
            assert api.get("/v1/engine")["damage"] == []
            check_what_was_open(api)
    for key in ("begun", "unmarked"):
        assert broker.log().count(f"the commit of transaction {key!r} was cut off: it goes on") == 1
    assert broker.stop() == 0
    assert main(["verify", str(data)]) == 0
    with LogReader(str(data)) as reader:
        found = {
            queue: [m for block in reader.messages(queue, 0, known.offset_end) for m in block.messages()]
            for queue, known in reader.queues().items()
        }
    shared = [value for key in LARGE for value in values(key, "b")]
    assert Counter(found["shared"]) == Counter(shared)
    for key in LARGE:
        assert found[key] == values(key, "a") + values(key, "b")


def check_what_was_there(api: Api) -> None:
    for queue, messages in EXPECTED["messages"].items():
        if queue != "letters":
            assert payloads(api, queue)[: len(messages)] == [it.encode() for it in messages]
    doors = [it["protocol"] for it in look(api, "doors")]
    assert doors[:18] == ["phpmq"] * 5 + ["rq"] * 5 + ["http"] * 8
    assert [it["state"] for it in look(api, "doors")][:4] == ["gone", "gone", "ready", "ready"]
    sent = look(api, "doors")[10]
    assert (0 < sent["ttl"] < TTL, sent["retries"]) == (True, 7)
    assert [it["reason"] for it in look(api, "bills")][:5] == [None] * 3 + ["bad-record"] * 2
    letters = look(api, "letters")
    for offset, word in [
        *((at, "repaired") for at in (1, 4, 7)),
        *((at, "begun-repaired") for at in range(10, 22)),
    ]:
        letter = letters[offset]
        assert b64decode(letter["value_base64"]) == f"{word}-{offset:02d}".encode()
        assert (letter["state"], letter["repaired"]) == ("ready", True)
    assert Counter(it["state"] for it in letters[22:30]) == {"dead": 8}
    (reader,) = api.get("/v1/readers")["readers"]
    assert reader["name"] == "archive"
    for key in ("done", "repair"):
        reply = commit(api, key, *IDS[key])
        assert reply.json == {**EXPECTED[key]["answer"], "repeated": True}


def check_what_had_begun(api: Api) -> None:
    for key in ("begun", "unmarked", "ended"):
        assert api.get(f"/v1/transactions/{key}")["state"] == "committed"
        reply = commit(api, key, *IDS[key])
        assert (reply.status, reply.json["repeated"]) == (200, True)
        assert sum(it["offset_end"] - it["offset_start"] for it in reply.json["stored"]) == 180
        assert commit(api, key, "f" * 32).problem == "stage-not-found"
        assert payloads(api, key) == values(key, "a") + values(key, "b")


def check_what_was_open(api: Api) -> None:
    for key in ("open", "unbegun"):
        # The last one of `open` is not named, and goes.
        before = api.get(f"/v1/transactions/{key}")["state"] == "committed"
        reply = commit(api, key, *IDS[key][:4])
        assert (reply.status, reply.json["repeated"]) == (200, before), reply
        assert commit(api, key, *IDS[key][:4]).json == {**reply.json, "repeated": True}
    assert payloads(api, "opened") == [b"open-a-%d" % it for it in range(4)] + [b"open-b-0", b"open-b-1"]
    # Their time counts from the commit.
    assert all(TTL - 100 < it["ttl"] <= TTL for it in look(api, "opened")[:4])
    assert [it["retries"] for it in look(api, "opened")[:4]] == [0, 1, 2, 3]
    assert [it["reason"] for it in look(api, "bills")][5:] == [None] * 2 + ["bad-record"] * 2
    assert payloads(api, "bills")[5:] == [b"open-b-0", b"open-b-1", b"open-dead-0", b"open-dead-1"]
    for offset in (30, 32):
        assert payloads(api, "letters")[offset] == b"open-repaired-%d" % offset
    assert payloads(api, "unbegun") == values("unbegun", "a") + values("unbegun", "b")
    if api.ask("GET", "/v1/transactions/other").status == 200:
        assert [it["count"] for it in api.get("/v1/transactions/other")["stages"]] == [1]


# --- every moment ---


async def taken_over(rig: Rig) -> bool:
    """All that can be taken over is, or the process has died; whether it lives."""
    async with asyncio.timeout(WAIT_SECONDS):
        while any(not it.tried.is_set() for it in rig.stages._old._left.values()):
            if rig.moments.dead:
                return False
            await asyncio.sleep(0.001)
    return not rig.moments.dead


@pytest.mark.parametrize("log_too", some([False, True], True), ids=["second dies", "both die"])
def test_whenever_a_process_dies_everything_is_taken_over_once(
    tmp_path: Path, log_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = os.remove

    async def one_life(last: int) -> bool:
        folder = tmp_path / str(last)
        folder.mkdir()
        rig = Rig(unpacked(folder))

        def remove_or_die(path: str) -> None:
            rig.moments.here()
            remove(path)
            rig.moments.here()

        monkeypatch.setattr(os, "remove", remove_or_die)
        alive = False
        with suppress(Died):
            await rig.start(last)
            alive = await taken_over(rig)
        await rig.die(log_too=log_too)
        await rig.start()
        assert await taken_over(rig)
        for key in ("open", "unbegun"):
            assert not (await rig.stages.commit(key, IDS[key][:4])).repeated, f"at moment {last}"
        for key in ("begun", "unmarked", "ended"):
            assert (await rig.stages.commit(key, IDS[key])).repeated
        found = rig.stored()
        for key in LARGE:
            assert found[key] == values(key, "a") + values(key, "b"), f"at moment {last}"
        assert Counter(found["shared"]) == Counter(it for key in LARGE for it in values(key, "b"))
        assert found["opened"] == [b"open-a-%d" % it for it in range(4)] + [b"open-b-0", b"open-b-1"]
        assert (await rig.stages.standing("other"))[1][0]["count"] == 1
        assert rig.stages._old._task is not None
        await rig.stages._old._task
        assert not (rig.folder / "stages").exists()
        await rig.end()
        return not alive

    assert asyncio.run(every_moment(one_life)) > 60


# --- what cannot be taken over ---


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.long
def test_damaged_files_are_named_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        folder = unpacked(tmp_path)
        stages = folder / "stages"
        damaged = [stages / f"{it}.stage" for it in (IDS["open"][0], IDS["other"][0], IDS["begun"][2])]
        for path, at in zip(damaged, (-1, 20, -1), strict=True):
            flip(path, at)
        (stages / "of nobody.tmp").write_bytes(b"")
        rig = Rig(folder)
        before = rig.stored()
        await rig.start()
        assert await taken_over(rig)
        for path in damaged:
            assert str(path) in caplog.text
            assert path.exists()
        with pytest.raises(CallRefused, match=f"has no stage '{IDS['open'][0]}'"):
            await rig.stages.commit("open", IDS["open"])
        await rig.stages.commit("open", IDS["open"][1:4])
        with pytest.raises(Problem, match="there is no transaction 'other'"):
            await rig.stages.standing("other")
        for ask in (rig.stages.standing("begun"), rig.stages.abort("begun"), rig.stages.commit("begun", [])):
            with pytest.raises(Problem, match=f"cannot be finished: {damaged[2]}") as conflict:
                await ask
            assert conflict.value.name == "conflict"
        assert rig.stored()["begun"] == before["begun"]
        assert rig.stages._old._task is not None
        await rig.stages._old._task
        assert {it.suffix for it in stages.iterdir()} == {".stage", ".intent"}
        await rig.end()

    asyncio.run(story())


def test_of_a_lost_intent_the_rest_is_not_guessed(tmp_path: Path) -> None:
    async def story() -> None:
        folder = unpacked(tmp_path)
        for path in (folder / "stages").glob("*.intent"):
            flip(path, 20)
        rig = Rig(folder)
        before = rig.stored()
        await rig.start()
        assert await taken_over(rig)
        for key, steps in (("begun", 4), ("unmarked", 1)):
            with pytest.raises(Problem, match=f"the log has {steps} chunks of it"):
                await rig.stages.commit(key, IDS[key])
            (folder / "stages" / f"{IDS[key][0]}.stage").unlink()
        assert (await rig.stages.commit("ended", IDS["ended"])).repeated
        assert not (await rig.stages.commit("unbegun", IDS["unbegun"])).repeated
        await rig.die(log_too=False)
        # With no file left of a key, the log says it.
        for path in (folder / "stages").glob("*.stage"):
            path.unlink()
        await rig.start()
        other = await rig.stage("begun", ("begun", [b"something else"]))
        with pytest.raises(CallRefused, match="transaction 'begun': 4 chunks of it are in the log"):
            await rig.stages.commit("begun", [other["stage"]])
        with pytest.raises(CallRefused, match="transaction 'begun' has begun"):
            await rig.stages.abort("begun")
        assert rig.stored()["begun"] == before["begun"]
        await rig.end()

    asyncio.run(story())


def test_where_there_is_no_room_it_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a queue's max-bytes does not bound what was promised."""
    monkeypatch.setattr(old, "PAUSE_SECONDS", 0.001)

    async def story() -> None:
        settings = LogSettings(stages_bytes_max=5000)
        rig = Rig(unpacked(tmp_path), settings, {"begun": {"max-bytes": 100}})
        await rig.start()
        assert await taken_over(rig)
        with pytest.raises(Problem, match=r"'begun' is of an earlier version, .*stages-bytes-max") as problem:
            await rig.stages.commit("begun", IDS["begun"])
        assert problem.value.name == "unavailable"
        assert caplog.text.count("'begun' is of an earlier version") == 1
        other = await rig.stage("new", ("new", [b"goes on"]))
        await rig.stages.commit("new", [other["stage"]])
        rig.log._state.settings.stages_bytes_max = 1 << 20
        async with asyncio.timeout(WAIT_SECONDS):
            while rig.stages._old._left:
                await asyncio.sleep(0.001)
        assert (await rig.stages.commit("begun", IDS["begun"])).repeated
        assert rig.stored()["begun"] == values("begun", "a") + values("begun", "b")
        assert rig.log.stages("transaction/begun") == []
        await rig.end()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())


def test_a_file_that_the_disk_does_not_give_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector, or an owner that a restored backup has wrong."""
    monkeypatch.setattr(old, "PAUSE_SECONDS", 0.001)

    async def story() -> None:
        rig = Rig(unpacked(tmp_path))
        path = rig.folder / "stages" / f"{IDS['begun'][2]}.stage"
        away = path.rename(tmp_path / "away")
        path.mkdir()
        await rig.start()
        assert await taken_over(rig)
        with pytest.raises(Problem, match="Is a directory"):
            await rig.stages.commit("begun", IDS["begun"])
        path.rmdir()
        away.rename(path)
        async with asyncio.timeout(WAIT_SECONDS):
            while rig.stages._old._left:
                await asyncio.sleep(0.001)
        assert rig.stored()["begun"] == values("begun", "a") + values("begun", "b")
        await rig.end()

    asyncio.run(story())
