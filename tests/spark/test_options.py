"""What may be said to the source and the sink, and what is answered to everything else."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from penstock.log.tables import VIEWS
from penstock.spark.options import (
    BATCH,
    EARLIEST,
    LATEST,
    READING,
    STREAM,
    WrongOption,
    read_options,
    view_of,
    write_options,
)
from penstock.spark.source import WrongSchema, check_schema, schema_of
from penstock.spark.writing_columns import columns_for


def given(**options: str) -> Mapping[str, str]:
    """Options as Spark hands them over."""
    return CaseInsensitiveDict({"subscribe": "orders", **options})


# --- defaults --------------------------------------------------------------------------------------


def test_a_batch_begins_at_the_earliest_and_ends_at_the_latest() -> None:
    options = read_options(given(), BATCH)
    assert options.url == "http://127.0.0.1:9180"
    assert options.view == "messages"
    assert (options.starting_offsets, options.ending_offsets) == (EARLIEST, LATEST)
    assert options.fail_on_data_loss
    assert options.retry_seconds == 30
    assert (options.max_offsets_per_trigger, options.min_partitions, options.reader) == (None, None, None)
    assert options.max_bytes_per_partition == 64 << 20


def test_a_stream_begins_at_the_latest() -> None:
    assert read_options(given(), STREAM).starting_offsets == LATEST


@pytest.mark.parametrize("name", ["startingOffsets", "STARTINGOFFSETS", "startingoffsets"])
def test_case_does_not_matter(name: str) -> None:
    assert read_options(given(**{name: "earliest"}), STREAM).starting_offsets == EARLIEST


def test_every_option_can_be_said() -> None:
    said = {
        "url": "https://broker:9180",
        "token": "secret",
        "view": "EVENTS",
        "startingOffsets": '{"orders": 42}',
        "maxOffsetsPerTrigger": "1000",
        "minOffsetsPerTrigger": "10",
        "maxTriggerDelay": "90s",
        "includeHeaders": "false",
        "minPartitions": "8",
        "failOnDataLoss": "False",
        "history": "false",
        "copies": "true",
        "reader": "nightly",
        "retrySeconds": "2.5",
        "engine": "tls://ann:secret@a:4222,b",
        "credentials": "/etc/ann.creds",
        "tlsCa": "/etc/ca.pem",
        "tlsCertificate": "/etc/ann.pem",
        "tlsKey": "/etc/ann.key",
    }
    options = read_options(given(**said), STREAM)
    assert options.url == "https://broker:9180"
    assert options.token == "secret"
    assert options.view == "events"
    assert options.starting_offsets == {"orders": 42}
    assert options.max_offsets_per_trigger == 1000
    assert (options.min_offsets_per_trigger, options.max_trigger_delay) == (10, 90)
    assert options.min_partitions == 8
    assert not options.fail_on_data_loss
    assert options.reader == "nightly"
    assert options.retry_seconds == 2.5
    assert options.engine == "tls://ann:secret@a:4222,b"
    assert (options.credentials, options.tls_ca) == ("/etc/ann.creds", "/etc/ca.pem")
    assert (options.tls_certificate, options.tls_key) == ("/etc/ann.pem", "/etc/ann.key")
    assert "secret" not in repr(options)
    rest = {option.name for option in READING} - said.keys() - {"subscribe", "subscribePattern"}
    assert rest == {
        "endingOffsets",
        "startingTimestamp",
        "endingTimestamp",
        "startingOffsetsByTimestamp",
        "endingOffsetsByTimestamp",
        "maxBytesPerTrigger",
        "maxBytesPerPartition",
        "pushFilters",
    }
    messages = read_options(given(maxBytesPerTrigger="10m", maxBytesPerPartition="1048576"), STREAM)
    assert (messages.max_bytes_per_trigger, messages.max_bytes_per_partition) == (10 << 20, 1 << 20)


# --- what to read ----------------------------------------------------------------------------------


def test_a_list_of_queues() -> None:
    options = read_options({"subscribe": " a, b ,a,, c/d"}, BATCH)
    assert options.subscribe == ("a", "b", "c/d")
    assert options.wants("c/d")
    assert not options.wants("c")


def test_a_pattern_fits_whole_names() -> None:
    options = read_options({"subscribePattern": "order.|x"}, BATCH)
    assert [name for name in ("orders", "order", "my-orders", "x", "xx") if options.wants(name)] == [
        "orders",
        "x",
    ]
    # As reports write it for one queue: blanks are a part of it.
    assert read_options({"subscribePattern": re.escape(" a ")}, BATCH).wants(" a ")


@pytest.mark.parametrize("options", [{}, {"subscribe": "a", "subscribePattern": "b"}])
def test_one_of_two_says_what_to_read(options: dict[str, str]) -> None:
    with pytest.raises(WrongOption, match="one of the options subscribe and subscribePattern"):
        read_options(options, BATCH)


# --- times and offsets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("0", 0),
        ("1700000000123", 1_700_000_000_123_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000),
        ("2023-11-14T23:13:20.000001+01:00", 1_700_000_000_000_001),
        ("2023-11-14T22:13:20", 1_700_000_000_000_000),
        ("2023-11-14", 1_699_920_000_000_000),
        ("1960-01-01", 0),
        # Later than a date can be: its last moment.
        ("999999999999999", 253_402_300_799_999_999),
        ("9999-12-31T23:59:59-14:00", 253_402_300_799_999_999),
    ],
)
def test_times(text: str, time_us: int) -> None:
    assert read_options(given(startingTimestamp=text), STREAM).starting_timestamp == time_us


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("earliest", EARLIEST),
        ("Latest", LATEST),
        ('{"orders": -2}', {"orders": -2}),
        ('{"orders": -1}', {"orders": -1}),
        ('{"orders": 0}', {"orders": 0}),
    ],
)
def test_offsets(text: str, bound: object) -> None:
    assert read_options(given(startingOffsets=text), STREAM).starting_offsets == bound


# --- what is refused -------------------------------------------------------------------------------

REFUSED = [
    (BATCH, "startingOffset", "earliest", "no option 'startingoffset'; did you mean 'startingOffsets'?"),
    (BATCH, "maxofsetspertriger", "1", "did you mean 'maxOffsetsPerTrigger'?"),
    (BATCH, "kafka.bootstrap.servers", "x", "there is no option 'kafka.bootstrap.servers'; there are url,"),
    (BATCH, "path", "orders", "no option 'path'; name queues with the option subscribe"),
    (BATCH, "url", "ftp://x", "option 'url': 'ftp://x': there is no scheme 'ftp'"),
    (BATCH, "url", "phpmq://127.0.0.1", "option 'url': 'phpmq://127.0.0.1' is no URL for a http client"),
    (
        BATCH,
        "url",
        "http://a,https://b",
        "option 'url': 'http://a,https://b': several addresses have one scheme",
    ),
    (BATCH, "url", "http://a,", "option 'url': 'http://a,': a host is missing"),
    (BATCH, "token", " ", "option 'token': it is empty"),
    (STREAM, "startingOffsets", "[" * 100_000, "is none of earliest, latest and JSON with a number"),
    (STREAM, "token", "s3\nX: y", "option 'token': it has a character in it that no token has"),
    (BATCH, "subscribe", " , ", "option 'subscribe': it names no queue"),
    (BATCH, "subscribe", "orders.dead", "the door to the dead letters of 'orders'"),
    (BATCH, "subscribe", "a\nb", "control character"),
    (BATCH, "view", "table", "option 'view' is 'table': use messages, events or state"),
    (STREAM, "view", "state", "view 'state' is read as a batch"),
    (BATCH, "startingOffsets", "newest", "option 'startingOffsets': 'newest' is none of earliest, latest"),
    (BATCH, "startingOffsets", "{}", "is none of earliest, latest and JSON"),
    (BATCH, "startingOffsets", '{"orders": "1"}', "queue 'orders': \"1\" is no offset"),
    (BATCH, "startingOffsets", '{"orders": -3}', "-3 is no offset"),
    (BATCH, "startingOffsets", '{"orders": true}', "true is no offset"),
    (BATCH, "startingOffsets", "latest", "begins at the latest offset is empty"),
    (BATCH, "startingOffsets", '{"orders": -1}', "begins at the latest offset is empty"),
    (BATCH, "endingOffsets", "earliest", "ends at the earliest offset is empty"),
    (STREAM, "endingOffsets", "latest", "'endingOffsets' is not for a stream: a stream has no end"),
    (BATCH, "maxOffsetsPerTrigger", "5", "'maxOffsetsPerTrigger' is not for a batch"),
    (STREAM, "maxOffsetsPerTrigger", "0", "option 'maxOffsetsPerTrigger' is '0': use a whole number from 1"),
    (BATCH, "minPartitions", "two", "option 'minPartitions' is 'two': use a whole number from 1"),
    (BATCH, "failOnDataLoss", "no", "option 'failOnDataLoss' is 'no': use true or false"),
    (BATCH, "pushFilters", "on", "option 'pushFilters' is 'on': use true or false"),
    (
        STREAM,
        "pushFilters",
        "true",
        "'pushFilters' is not for a stream: Spark pushes filters into batches only",
    ),
    (STREAM, "endingTimestamp", "0", "'endingTimestamp' is not for a stream: a stream has no end"),
    (STREAM, "endingOffsetsByTimestamp", "{}", "'endingOffsetsByTimestamp' is not for a stream"),
    (BATCH, "startingOffsetsByTimestamp", "7", "'7' is no JSON with a time for each queue"),
    (BATCH, "endingOffsetsByTimestamp", "{}", "'{}' is no JSON with a time for each queue"),
    (BATCH, "endingOffsetsByTimestamp", '{"orders": -1}', "queue 'orders': '-1' is no time"),
    (BATCH, "endingOffsetsByTimestamp", '{"orders": {"0": 5}}', "queue 'orders': '{\"0\": 5}' is no time"),
    (BATCH, "maxBytesPerTrigger", "5", "'maxBytesPerTrigger' is not for a batch"),
    (BATCH, "minOffsetsPerTrigger", "5", "'minOffsetsPerTrigger' is not for a batch"),
    (BATCH, "maxTriggerDelay", "5", "'maxTriggerDelay' is not for a batch"),
    (STREAM, "maxBytesPerTrigger", "0", "option 'maxBytesPerTrigger': '0' is no number of bytes"),
    (BATCH, "maxBytesPerPartition", "1.5m", "option 'maxBytesPerPartition': '1.5m' is no number of bytes"),
    (
        STREAM,
        "maxTriggerDelay",
        "soon",
        "option 'maxTriggerDelay': 'soon' is no time; use a number with its unit",
    ),
    (BATCH, "reader", "x", "'reader' is not for a batch: only a stream lives on"),
    (BATCH, "copies", "false", "'copies' is not for a batch: a batch has conditions; leave it out, and say"),
    (BATCH, "retrySeconds", "-1", "option 'retrySeconds' is '-1': use a number of seconds from 0"),
    (BATCH, "startingTimestamp", "yesterday", "option 'startingTimestamp': 'yesterday' is no time"),
]


@pytest.mark.parametrize(("kind", "name", "text", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_words(kind: str, name: str, text: str, words: str) -> None:
    with pytest.raises(WrongOption, match=re.escape(words)) as refusal:
        read_options(given(**{name: text}), kind)
    assert "\n" not in str(refusal.value)


def test_dead_letters_are_not_delayed() -> None:
    assert "delay" in columns_for(write_options({}, BATCH))
    assert "delay" not in columns_for(write_options({"dead": "bad-record"}, BATCH))


def test_a_reason_that_is_none_is_refused() -> None:
    with pytest.raises(WrongOption, match=r"option 'dead' is 'expired': use bad-record$"):
        write_options({"queue": "q", "dead": "expired"}, STREAM)


BY_TIME = '{"orders": 1700000000000}'
TOGETHER = [
    (
        {"startingOffsets": "earliest", "startingTimestamp": "0"},
        BATCH,
        "both say where to begin; leave one out",
    ),
    (
        {"startingTimestamp": "0", "startingOffsetsByTimestamp": BY_TIME},
        STREAM,
        "startingTimestamp and startingOffsetsByTimestamp both say where to begin",
    ),
    ({"endingOffsets": "latest", "endingTimestamp": "0"}, BATCH, "both say where to end; leave one out"),
    (
        {"endingOffsets": "latest", "endingOffsetsByTimestamp": BY_TIME},
        BATCH,
        "endingOffsets and endingOffsetsByTimestamp both say where to end",
    ),
    (
        {"startingTimestamp": "2024-01-02", "endingTimestamp": "2024-01-01"},
        BATCH,
        "startingTimestamp is later than endingTimestamp; nothing is between them",
    ),
    (
        {"startingOffsetsByTimestamp": BY_TIME, "endingOffsetsByTimestamp": '{"orders": 5}'},
        BATCH,
        "queue 'orders': startingOffsetsByTimestamp is later than endingOffsetsByTimestamp",
    ),
    (
        {"minOffsetsPerTrigger": "11", "maxOffsetsPerTrigger": "10"},
        STREAM,
        "minOffsetsPerTrigger is 11, which is more than maxOffsetsPerTrigger, 10",
    ),
    (
        {"maxTriggerDelay": "5m"},
        STREAM,
        "how long a stream waits for minOffsetsPerTrigger; say both, or neither",
    ),
    (
        {"view": "events", "maxBytesPerTrigger": "5m"},
        STREAM,
        "option 'maxBytesPerTrigger' counts payloads, and events have none; use maxOffsetsPerTrigger",
    ),
    ({"view": "events", "maxBytesPerPartition": "5m"}, BATCH, "events have none; use minPartitions"),
]


@pytest.mark.parametrize(("said", "kind", "words"), TOGETHER)
def test_what_does_not_go_together_is_one_sentence(said: dict[str, str], kind: str, words: str) -> None:
    with pytest.raises(WrongOption, match=re.escape(words)) as refusal:
        read_options(given(**said), kind)
    assert "\n" not in str(refusal.value)


def test_times_by_queue() -> None:
    said = given(startingOffsetsByTimestamp='{"orders": 1700000000123}')
    assert read_options(said, STREAM).starting_times == {"orders": 1_700_000_000_123_000}
    said = given(endingOffsetsByTimestamp='{"orders": "2023-11-14T22:13:20Z"}')
    assert read_options(said, BATCH).ending_times == {"orders": 1_700_000_000_000_000}
    assert not read_options(given(startingTimestamp="5"), STREAM).begins_at_ends
    assert not read_options(given(startingOffsetsByTimestamp=BY_TIME), STREAM).begins_at_ends
    assert (read_options(given(), BATCH).starting_times, read_options(given(), BATCH).ending_times) == (
        None,
        None,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("7b", 7),
        ("2k", 2048),
        ("64m", 64 << 20),
        ("64 MiB", 64 << 20),
        ("1GB", 1 << 30),
        ("1t", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert read_options(given(maxBytesPerPartition=text), BATCH).max_bytes_per_partition == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500", 0.5), ("500ms", 0.5), ("90s", 90), ("15 m", 900), ("2min", 120), ("1h", 3600)],
)
def test_delays(text: str, seconds: float) -> None:
    said = given(minOffsetsPerTrigger="5", maxTriggerDelay=text)
    assert read_options(said, STREAM).max_trigger_delay == pytest.approx(seconds)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(WrongOption, match="'orders\\[' is no regular expression"):
        read_options({"subscribePattern": "orders["}, BATCH)


def test_wrong_names_are_refused_with_the_schema_already() -> None:
    with pytest.raises(WrongOption, match="did you mean 'subscribe'"):
        view_of({"subscrib": "orders"})
    with pytest.raises(
        WrongOption, match="'includeHeaders': view 'state' has no headers; view 'messages' has"
    ):
        view_of({"includeHeaders": "true", "view": "state"})
    assert view_of({"includeheaders": "TRUE"}) == ("messages", True)


# --- writing ---------------------------------------------------------------------------------------


def test_writing_options() -> None:
    options = write_options(CaseInsensitiveDict({"queue": "orders", "transactionId": "t1"}), BATCH)
    assert (options.queue, options.transaction_id, options.token) == ("orders", "t1", None)


def test_a_token_of_the_driver_s_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("by-file\n")
    file.chmod(0o600)
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(file))
    assert write_options({"queue": "q"}, BATCH).token == "by-file"
    assert not caplog.records
    file.chmod(0o644)
    assert read_options({"subscribe": "q"}, BATCH).token == "by-file"
    assert caplog.messages == [f"{file} holds a secret, and other users can read it; chmod 600 {file}"]
    assert read_options({"subscribe": "q", "token": "said"}, BATCH).token == "said"
    monkeypatch.setenv("PENSTOCK_TOKEN", "itself")
    assert read_options({"subscribe": "q"}, BATCH).token == "itself"
    assert len(caplog.records) == 1


def test_spark_s_own_options_are_no_concern_of_the_sink() -> None:
    assert write_options({"checkpointlocation": "/x", "queue": "q"}, STREAM).queue == "q"


def test_a_stream_has_no_transaction_id() -> None:
    with pytest.raises(WrongOption, match="'transactionId' is not for a stream"):
        write_options({"transactionid": "t1"}, STREAM)


# --- NATS ------------------------------------------------------------------------------------------


def test_only_messages_are_read_from_nats() -> None:
    assert not read_options(given(), BATCH).is_direct
    nats = {"engine": "nats://a:4222,b:4222,c:4222"}
    assert read_options(given(**nats), BATCH).is_direct
    for view in ("events", "state"):
        assert not read_options(given(view=view, **nats), BATCH).is_direct


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "http://a"}, "option 'engine': NATS server 'http://a': is no address"),
        ({"engine": "log"}, "option 'engine': 'log' is the broker's own"),
        ({"engine": "file:data"}, "option 'engine': 'file:data' names no folder from the root on"),
        ({"engine": "auto", "tlsCa": "x"}, "option 'tlsCa' is for NATS"),
        ({"engine": "file:/data", "credentials": "x"}, "option 'credentials' is for NATS"),
        ({"credentials": "x"}, "option 'credentials' is for NATS; name its servers with the option engine"),
        ({"tlsCa": "x"}, "option 'tlsCa' is for NATS"),
        ({"engine": "a", "tlsCertificate": "x"}, "tlsCertificate and tlsKey belong together"),
        ({"engine": "a", "tlsKey": "x"}, "tlsCertificate and tlsKey belong together"),
    ],
)
def test_what_does_not_go_together_for_nats(options: dict[str, str], words: str) -> None:
    with pytest.raises(WrongOption, match=re.escape(words)):
        read_options(given(**options), BATCH)


@pytest.mark.parametrize(
    ("engine", "files", "folder"),
    [
        (None, True, None),
        (" AUTO ", True, None),
        ("http", False, None),
        ("file:/srv/Penstock/", True, "/srv/Penstock"),
        ("nats://a:4222", False, None),
    ],
)
def test_who_may_read_files(engine: str | None, files: bool, folder: str | None) -> None:
    said = given(**({} if engine is None else {"engine": engine}))
    for view in ("messages", "events"):
        options = read_options({**said, "view": view}, BATCH)
        assert (options.may_read_files, options.folder) == (files, folder)
        assert options.is_direct == (engine == "nats://a:4222" and view == "messages")
    assert not read_options({**said, "view": "state"}, BATCH).may_read_files


# --- schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_the_whole_schema_is_right(view: str) -> None:
    assert check_schema(view, schema_of(view)) == schema_of(view)


def test_headers_stand_behind_all_others() -> None:
    whole = schema_of("messages", headers=True)
    assert whole.fields == [
        *schema_of("messages"),
        StructField("headers", MapType(StringType(), StringType())),
    ]
    assert check_schema("messages", whole) is whole
    with pytest.raises(WrongSchema, match="view 'events' has no column 'headers'"):
        check_schema("events", StructType(whole.fields[-1:]))


def test_some_columns_in_any_order() -> None:
    schema = StructType([StructField("value", schema_of("messages")["value"].dataType), _offset()])
    assert check_schema("messages", schema) is schema


def _offset(nullable: bool = True) -> StructField:
    return StructField("offset", LongType(), nullable)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (StructType(), "the schema has no column; view 'messages' has queue, offset"),
        (StructType([StructField("ofset", LongType())]), "no column 'ofset'; did you mean 'offset'?"),
        (StructType([StructField("zzz", LongType())]), "no column 'zzz'; there are queue, offset"),
        (
            StructType([StructField("value", StringType())]),
            "column 'value' of view 'messages' is binary, not string; read it as that, and cast it",
        ),
        (StructType([_offset(), _offset()]), "column 'offset' twice"),
        (
            StructType([StructField("expires", schema_of("messages")["expires"].dataType, False)]),
            "'expires' of view 'messages' can be null",
        ),
    ],
)
def test_other_schemas_are_refused_in_words(schema: StructType, words: str) -> None:
    with pytest.raises(WrongSchema, match=re.escape(words)):
        check_schema("messages", schema)
    assert check_schema("messages", StructType([_offset(nullable=False)]))
