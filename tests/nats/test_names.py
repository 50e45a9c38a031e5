"""What logs are called: of a cluster with one shard as ever, of one with more by their numbers."""

import pytest

from penstock.log.jetstream.names import LogNameError, LogNames
from penstock.log.jetstream.rights import rights_of_front_end, rights_of_reader


def test_a_cluster_with_one_shard_has_the_names_of_earlier_versions() -> None:
    (names,) = LogNames("eu").of_shards(1)
    assert (names.stream, names.files) == ("PENSTOCK_eu", "penstock.eu.file.>")
    assert rights_of_front_end(LogNames("eu"), 1) == rights_of_front_end(LogNames("eu"))


def test_each_shard_has_a_stream_and_subjects_and_all_share_state_and_key() -> None:
    logs = LogNames("eu").of_shards(101)
    assert logs[3].stream == "PENSTOCK_eu_S03"
    assert logs[100].stream == "PENSTOCK_eu_S100"
    assert logs[3].file("log-1.x") == "penstock.eu.s03.file.log-1.x"
    assert logs[3].name_of("penstock.eu.s03.file.log-1.x") == "log-1.x"
    assert logs[3].stream_settings(1)["subjects"] == ["penstock.eu.s03.file.>"]
    assert {it.state_stream for it in logs} == {"PENSTOCK_eu_STATE"}
    assert {it.key for it in logs} == {"penstock.eu.key"}
    assert len({it.stream for it in logs}) == len({it.files for it in logs}) == 101


def test_rights_are_for_all_logs() -> None:
    front, reader = rights_of_front_end(LogNames(), 16), rights_of_reader(LogNames(), 16)
    for number in range(16):
        stream = f"PENSTOCK_penstock_S{number:02d}"
        assert {f"$JS.API.STREAM.{verb}.{stream}" for verb in ("INFO", "CREATE", "PURGE")} <= set(
            front.publish
        )
        assert f"penstock.penstock.s{number:02d}.file.>" in front.publish
        assert f"$JS.API.DIRECT.GET.{stream}" in reader.publish


@pytest.mark.parametrize("shard", [-1, 256])
def test_there_are_no_more_than_256(shard: int) -> None:
    with pytest.raises(LogNameError, match=f"no shard {shard}: they are 0 to 255"):
        LogNames("eu", shard)
