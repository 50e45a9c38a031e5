"""JetStream's API against a real server: streams, reading, leases."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.errors import Failure, JetStreamError
from tests.nats.cluster import api, forming, linked, stream_settings, until

Body = Callable[[JetStream], Awaitable[None]]


def with_api(node: Cluster, body: Body) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            await body(api(link))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        (Failure(503, 0, "nobody listens"), True),
        (Failure(503, 10008, "JetStream system temporarily unavailable"), True),
        (Failure(400, 10005, "no suitable peers for placement"), True),
        (Failure(400, 10005, "no suitable peers for placement, peer offline"), True),
        (Failure(400, 10005, "no suitable peers for placement, miscellaneous issue"), True),
        (Failure(400, 10005, "no suitable peers for placement, peer offline, insufficient storage"), True),
        (Failure(400, 10005, "no suitable peers for placement, insufficient storage"), False),
        (Failure(400, 10005, "no suitable peers for placement, tags not matched ['ssd']"), False),
        (Failure(503, 10039, "JetStream not enabled for account"), False),
        (Failure(500, 10047, "insufficient storage resources available"), False),
        (Failure(500, 10074, "replicas > 1 not supported in non-clustered mode"), False),
        (Failure(503, 10076, "JetStream not enabled"), False),
        (Failure(404, 0, "No Messages"), False),
        (Failure(400, 10071, "wrong last sequence: 2"), False),
    ],
)
def test_an_error_says_whether_it_passes(failure: Failure, again: bool) -> None:
    error = JetStreamError("question", failure)
    assert error.again is again
    assert ("it may work in a moment" in str(error)) is again


def test_a_cluster_that_is_just_forming_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three nodes have no place for three copies; in a moment the third is there."""
    caplog.set_level("INFO", "penstock.nats")
    with forming(tmp_path) as cluster:

        async def body(js: JetStream) -> None:
            making = asyncio.create_task(js.create_stream(stream_settings("early", 3)))
            waits = "waiting: STREAM.CREATE.early: JetStream says 'no suitable peers for placement'"
            await until("it waits", lambda: making.done() or waits in caplog.text)
            cluster.nodes[2].start()
            assert len((await making)["cluster"]["replicas"]) == 2

        with_api(cluster, body)


def test_streams(node: Cluster) -> None:
    async def body(js: JetStream) -> None:
        assert (await js.account())["api"]["errors"] == 0
        settings = stream_settings("made", 1)
        assert (await js.create_stream(settings))["did_create"]
        await js.create_stream(settings)
        with pytest.raises(JetStreamError, match=r"error 10058\); it will not work before") as caught:
            await js.create_stream({**settings, "max_msgs": 5})
        assert not caught.value.again
        for n in range(5):
            assert await js.put("q.made", b"%d" % n) == n + 1
        assert await js.purge_subject("made", "q.made", before_seq=4) == 3
        state = (await js.stream("made"))["state"]
        assert (state["first_seq"], state["last_seq"], state["messages"]) == (4, 5, 2)
        await js.call("STREAM.DELETE.made")
        with pytest.raises(JetStreamError, match="stream not found") as caught:
            await js.stream("made")
        assert caught.value.not_found

    with_api(node, body)


def test_reading_a_range_skips_holes(node: Cluster) -> None:
    async def body(js: JetStream) -> None:
        await js.create_stream(stream_settings("range", 1))
        assert await js.read("range", 1, 10) == []
        for n in range(1, 11):
            await js.put("q.range", b"%d" % n)
        await js.call("STREAM.MSG.DELETE.range", {"seq": 4, "no_erase": True})
        found = await js.read("range", 3, 4)
        assert [(one.seq, one.subject, one.payload) for one in found] == [
            (seq, "q.range", b"%d" % seq) for seq in (3, 5, 6, 7)
        ]
        assert await js.read("range", 11, 10) == []
        assert len(await js.read("range", 1, 10, bytes_max=1)) >= 1

    with_api(node, body)


def test_reading_one_subject(node: Cluster) -> None:
    async def body(js: JetStream) -> None:
        await js.create_stream(stream_settings("two", 1, subjects=["two.>"]))
        for n in range(1, 11):
            await js.put("two.odd.x" if n % 2 else "two.even", b"%d" % n)
        for seq, count, bytes_max, only, seqs in (
            (2, 3, 0, "two.odd.x", [3, 5, 7]),
            (1, 100, 0, "two.even", [2, 4, 6, 8, 10]),
            (1, 100, 1, "two.even", [2]),
            (10, 100, 0, "two.odd.x", []),
            (1, 100, 0, "two.none", []),
        ):
            found = await js.read("two", seq, count, bytes_max=bytes_max, only=only)
            assert [(one.seq, one.payload) for one in found] == [(seq, b"%d" % seq) for seq in seqs]
        for seq, subject, wanted in ((1, "two.even", 2), (4, "two.odd.x", 5), (4, ">", 4)):
            stored = await js.next_message("two", seq, subject)
            assert stored is not None
            assert (stored.seq, stored.payload) == (wanted, b"%d" % wanted)
        assert await js.next_message("two", 10, "two.odd.x") is None

    with_api(node, body)


def test_a_lease_is_taken_once(node: Cluster) -> None:
    async def body(js: JetStream) -> None:
        await js.create_stream(
            stream_settings("leases", 1, subjects=["lease.>"], max_msgs_per_subject=1, allow_rollup_hdrs=True)
        )
        assert await js.last("leases", "lease.a") is None
        first = await js.put("lease.a", b"me", last_seq=0)
        with pytest.raises(JetStreamError, match="wrong last sequence") as caught:
            await js.put("lease.a", b"you", last_seq=0)
        assert caught.value.wrong_last
        second = await js.put("lease.a", b"me, longer", last_seq=first)
        held = await js.last("leases", "lease.a")
        assert held is not None
        assert (held.seq, held.subject, held.payload) == (second, "lease.a", b"me, longer")
        await js.put("lease.b", b"other", last_seq=0)
        found = await js.last_of("leases", ["lease.>"])
        assert {one.subject: one.payload for one in found} == {
            "lease.a": b"me, longer",
            "lease.b": b"other",
        }
        winners = await asyncio.gather(
            *(js.put("lease.c", b"%d" % n, last_seq=0) for n in range(10)), return_exceptions=True
        )
        assert sum(isinstance(winner, int) for winner in winners) == 1

    with_api(node, body)


def test_an_id_is_stored_once(node: Cluster) -> None:
    async def body(js: JetStream) -> None:
        await js.create_stream(stream_settings("ids", 1))
        assert await js.put("q.ids", b"a", message_id="x") == 1
        assert await js.put("q.ids", b"a", message_id="x") == 1
        assert await js.put("q.ids", b"b", message_id="y", stream="ids") == 2
        with pytest.raises(JetStreamError, match="expected stream does not match"):
            await js.put("q.ids", b"c", stream="other")

    with_api(node, body)
