"""Settings: defaults, the three sources and who beats whom, every mistake with its line, reload, help."""

import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.common.address import TcpAddress, UnixAddress
from penstock.common.given import SettingsError
from penstock.common.kinds import Whole, WrongValue
from penstock.errors import PenstockError
from penstock.log.state import LogSettings
from penstock.model.policy import Policies, QueuePolicy
from penstock.protocols import phpmq, rq, sspq
from penstock.protocols.phpmq_session import ConsumeMode
from penstock.protocols.phpmq_write import TtlPacket
from penstock.protocols.sspq_session import QUEUE_DEFAULT
from penstock.server.settings import (
    HTTP_KEYS,
    LISTENER_KEYS,
    SECTIONS,
    TABLE,
    TOKEN_KEYS,
    HttpSettings,
    Limits,
    Listener,
    Setting,
    Settings,
)
from penstock.server.settings_read import reloadable_difference
from tests.server.settings_source import Source, parser

BY_LABEL = {setting.label: setting for setting in TABLE}


@pytest.fixture
def read(tmp_path: Path) -> Source:
    return Source(tmp_path)


def value_of(settings: Settings, setting: Setting) -> object:
    """What became of a row of the table."""
    doors = {listener.setting: listener for listener in settings.listeners}
    if setting.name == "sspq-queue":
        return doors["sspq"].queue
    if not setting.field:
        return str(doors[setting.name].address) if setting.name in doors else "off"
    if setting.name == "http":
        return str(settings.http.address) if settings.http else "off"
    value: Any = settings
    for name in setting.field.split("."):
        value = getattr(value, name)
    if isinstance(value, TcpAddress):
        return str(value)
    if isinstance(value, tuple):
        return ",".join(value) or None
    if setting.name == "socket-mode":
        return f"{value:04o}"
    return value / 1_000_000 if setting.field == "log.interval_us" else value


# --- defaults ---


def test_the_defaults(read: Source) -> None:
    settings = read()
    assert settings == Settings(
        data="./penstock-data",
        engine="log",
        listeners=(
            Listener("sspq", TcpAddress("127.0.0.1", 8888), setting="sspq"),
            Listener("phpmq", TcpAddress("127.0.0.1", 9100), setting="phpmq"),
            Listener("rq", TcpAddress("127.0.0.1", 13700), setting="rq"),
        ),
        http=HttpSettings(),
        durability="commit",
        drain_seconds=10.0,
        log_level="info",
        log_format="text",
        audit="DATA/audit.jsonl",
        limits=Limits(),
        log=LogSettings(),
        policies=Policies(),
    )
    assert settings.policies.for_queue("orders") == QueuePolicy()


def test_an_empty_file_changes_nothing(read: Source) -> None:
    assert read(file="") == read()


def test_the_limits_are_those_of_the_protocols() -> None:
    limits = Limits()
    assert phpmq.Limits() == phpmq.Limits(
        payload_bytes_max=limits.payload_bytes_max,
        queue_name_bytes_max=limits.queue_name_bytes_max,
        packets_per_message_max=limits.packets_per_message_max,
        windows_max=limits.consumed_queues_max,
    )
    assert rq.Limits() == rq.Limits(
        limits.payload_bytes_max, limits.queue_name_bytes_max, limits.consumed_queues_max
    )
    assert limits.payload_bytes_max == sspq.PAYLOAD_BYTES_MAX


@pytest.mark.parametrize("bound", ["lowest", "highest"])
def test_the_protocols_take_every_limit_that_can_be_set(bound: str) -> None:
    value = {
        setting.name: getattr(setting.kind, bound)
        for setting in SECTIONS["limits"]
        if isinstance(setting.kind, Whole)
    }
    payload, name = value["payload-bytes-max"], value["queue-name-bytes-max"]
    queues = value["consumed-queues-max"]
    # Each would raise on a limit that it cannot have.
    wide = phpmq.Limits(payload, name, value["packets-per-message-max"], windows_max=queues)
    assert wide.windows_max == rq.Limits(payload, name, queues).consumed_queues_max == queues
    assert sspq.FrameReader(payload_bytes_max=payload).feed(b"") == []


def test_the_words_are_those_of_the_protocols(read: Source) -> None:
    kinds = {key.name: key.kind for key in LISTENER_KEYS}
    assert list(kinds["ttl-packet"].words) == [word.value for word in TtlPacket]
    assert list(kinds["consume"].words) == [word.value for word in ConsumeMode]
    assert read().listeners[0].queue == QUEUE_DEFAULT


def test_settings_cannot_be_changed(read: Source) -> None:
    settings: Any = read()  # Any: to mypy, the assignments below are wrong already
    for part, name in ((settings, "data"), (settings.limits, "queues_max"), (settings.listeners[0], "mode")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, "x")


# --- the three sources ---

OTHER: Mapping[str, tuple[str, str]] = {
    "data": ("/one", "/two"),
    "audit": ("/one", "/two"),
    "engine": ("nats://a:4222,nats://b:4222", "tls://c"),
    "allow-unsafe-sync": ("true", "false"),
    "strict": ("true", "false"),
    "sspq": ("127.0.0.1:1", "unix:/two"),
    "sspq-queue": ("one", "two"),
    "phpmq": ("[::1]:1", "off"),
    "rq": ("broker.example:1", "0.0.0.0:0"),
    "http": ("unix:/one", "off"),
    "socket-mode": ("0660", "0777"),
    "durability": ("interval", "none"),
    "drain-seconds": ("1", "2.5"),
    "log-level": ("debug", "error"),
    "log-format": ("json", "text"),
    "[log] interval-seconds": ("0.01", "1.5"),
    "[cluster] name": ("one", "two-2"),
    "[cluster] id": ("one", "two-2"),
    "[archive] path": ("lake", "s3://bucket/penstock"),
    "[archive] queues": ("a*", "b,c"),
    "[cluster] listen": ("0.0.0.0:1", "[::1]:0"),
    "[cluster] advertise": ("10.0.0.1:1", "broker.example:2"),
    "[cluster] credentials": ("one.creds", "two.nk"),
    "[cluster] tls-ca": ("one.pem", "two.pem"),
    "[cluster] tls-certificate": ("one.pem", "two.pem"),
    "[cluster] tls-key": ("one.key", "two.key"),
    "[cluster] relay-certificate": ("one.pem", "two.pem"),
    "[cluster] relay-key": ("one.key", "two.key"),
    "[cluster] relay-ca": ("one.pem", "two.pem"),
    "[cluster] monitor": ("http://a:8222", "https://b:8222,http://[::1]:8222"),
}
"""Two values for every setting that is not a whole number."""


def two_values(setting: Setting) -> tuple[str, str]:
    if isinstance(setting.kind, Whole):
        return str(setting.kind.lowest), str(setting.kind.highest)
    return OTHER[setting.label]


def in_toml(setting: Setting, text: str) -> str:
    value = setting.kind.from_text(text)
    header = f"[{setting.section}]\n" if setting.section else ""
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
    return f"{header}{setting.name} = {shown}\n"


@pytest.mark.parametrize("label", BY_LABEL)
def test_flag_beats_environment_beats_file_beats_default(read: Source, label: str) -> None:
    setting = BY_LABEL[label]
    one, two = two_values(setting)

    def found(*arguments: str, **environ: str) -> object:
        return value_of(read(*arguments, **environ), setting)

    def wanted(text: str) -> object:
        value = setting.kind.from_text(text)
        return value if isinstance(value, str) else pytest.approx(value)

    assert found() == setting.default
    assert found("", in_toml(setting, one)) == wanted(one)
    assert found("", in_toml(setting, one), **{setting.variable: two}) == wanted(two)
    assert found(f"{setting.flag} {one}", in_toml(setting, two), **{setting.variable: two}) == wanted(one)
    assert found(f"{setting.flag}={two}") == wanted(two)
    assert found(**{setting.variable: one}) == wanted(one)


def test_names_are_the_documented_ones() -> None:
    assert [setting.flag for setting in SECTIONS[""]] == [
        "--data",
        "--engine",
        "--allow-unsafe-sync",
        "--strict",
        "--sspq",
        "--sspq-queue",
        "--phpmq",
        "--rq",
        "--http",
        "--socket-mode",
        "--durability",
        "--drain-seconds",
        "--log-level",
        "--audit",
        "--log-format",
    ]
    limit = BY_LABEL["[limits] connections-max"]
    assert (limit.flag, limit.variable) == ("--limits-connections-max", "PENSTOCK_LIMITS_CONNECTIONS_MAX")
    for name in ("flag", "variable", "dest", "label"):
        assert len({getattr(setting, name) for setting in TABLE}) == len(TABLE), name


def test_the_file_can_be_named_by_a_variable_and_the_flag_beats_it(read: Source, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('data = "a"')
    named = str(tmp_path / "a.toml")
    assert read(PENSTOCK_CONFIG=named).data == "a"
    assert read(file='data = "b"', PENSTOCK_CONFIG=named).data == "b"
    assert read(PENSTOCK_CONFIG="").data == "./penstock-data"


def test_an_empty_variable_is_not_given(read: Source) -> None:
    assert read(file='data = "a"', PENSTOCK_DATA="", PENSTOCK_RQ="").data == "a"


@pytest.mark.parametrize(
    "variable",
    [
        "PENSTOCK_URL",
        "PENSTOCK_TOKEN",
        "PENSTOCK_TOKEN_FILE",
        "PENSTOCK_TEST_SEED",
        "PENSTOCK_SERVICE_HOST",
        "PENSTOCK_SERVICE_PORT",
        "PENSTOCK_SERVICE_PORT_RQ",
        "PENSTOCK_PORT",
        "PENSTOCK_PORT_9100_TCP",
        "PENSTOCK_PORT_9100_TCP_ADDR",
        "PENSTOCK_RQ_SERVICE_HOST",
        "PENSTOCKS",
        "OTHER_DURABILITY",
    ],
)
def test_variables_that_are_none_of_ours(read: Source, variable: str) -> None:
    assert read(**{variable: "tcp://10.0.0.1:9100"}) == read()


def test_no_setting_is_mistaken_for_a_variable_of_others(read: Source) -> None:
    for setting in TABLE:
        assert setting.variable in read.error(**{setting.variable: "\0"})


# --- mistakes: one line that says where, what, and what would be right ---


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--durability comit", "--durability = 'comit': use commit, interval or none"),
        ("--durability ''", "--durability = '': use commit, interval or none"),
        ("--data ''", "--data = '': use a folder"),
        (
            "--engine lag",
            "--engine = 'lag': use log, or nats://HOST:PORT,HOST:PORT,… (tls:// for TLS)",
        ),
        ("--drain-seconds -1", "--drain-seconds = -1.0: use a number of seconds from 0 to 86400"),
        ("--drain-seconds nan", "--drain-seconds = 'nan': use a number of seconds from 0 to 86400"),
        ("--log-level loud", "--log-level = 'loud': use debug, info, warning or error"),
        ("--limits-queues-max 0", "--limits-queues-max = 0: use a whole number from 1 to 10000000"),
        ("--limits-queues-max 1.5", "--limits-queues-max = '1.5': use a whole number from 1 to 10000000"),
        (
            "--limits-queues-max " + "9" * 5000,
            f"--limits-queues-max = '{'9' * 47}...{'9' * 48}': use a whole number from 1 to 10000000",
        ),
        ("--sspq 8888", "--sspq = '8888': there is no port; use HOST:PORT, [IPV6]:PORT or unix:PATH; or off"),
        (
            "--http 9180",
            "--http = '9180': there is no port; use HOST:PORT, [IPV6]:PORT or unix:PATH; or off",
        ),
        (
            "--sspq-queue a.dead",
            "--sspq-queue: queue 'a.dead' cannot be sent to: it is the door to the dead letters of 'a';"
            " send to that queue",
        ),
        (
            "--sspq-queue seventeen-letters --limits-queue-name-bytes-max 16",
            "--sspq-queue: queue 'seventeen-letters': the name has 17 bytes; use at most 16",
        ),
        (
            "--rq 0.0.0.0:9100",
            "--rq: 0.0.0.0:9100 clashes with 127.0.0.1:9100 of phpmq (default);"
            " use another address, or turn phpmq off",
        ),
        (
            "--sspq 127.0.0.1:9100",
            "--sspq: 127.0.0.1:9100 clashes with 127.0.0.1:9100 of phpmq (default);"
            " use another address, or turn phpmq off",
        ),
        (
            "--sspq unix:/a --rq unix:/a",
            "--rq: unix:/a clashes with unix:/a of sspq (command line);"
            " use another address, or turn sspq off",
        ),
    ],
)
def test_wrong_flags(read: Source, words: str, line: str) -> None:
    assert read.error(words) == f"command line: {line}"


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        (
            "PENSTOCK_DURABILITY",
            "Commit",
            "PENSTOCK_DURABILITY = 'Commit': use commit, interval or none",
        ),
        (
            "PENSTOCK_DURABILTY",
            "",
            "PENSTOCK_DURABILTY: there is no such setting; did you mean PENSTOCK_DURABILITY?",
        ),
        (
            "PENSTOCK_durability",
            "none",
            "PENSTOCK_durability: there is no such setting; did you mean PENSTOCK_DURABILITY?",
        ),
        (
            "PENSTOCK_MAX_CONNECTIONS",
            "5",
            "PENSTOCK_MAX_CONNECTIONS: there is no such setting;"
            " did you mean PENSTOCK_LIMITS_CONNECTIONS_MAX?",
        ),
        (
            "PENSTOCK_LOG_CACHE_BYTES",
            "8MB",
            "PENSTOCK_LOG_CACHE_BYTES = '8MB': use a whole number from 0 to 1099511627776",
        ),
    ],
)
def test_wrong_variables(read: Source, variable: str, value: str, line: str) -> None:
    assert read.error(**{variable: value}) == f"environment: {line}"


def test_a_variable_like_no_other_gets_the_list(read: Source) -> None:
    line = read.error(PENSTOCK_XYZZY="1")
    assert line.startswith(
        "environment: PENSTOCK_XYZZY: there is no such setting; use one of PENSTOCK_DATA, "
    )
    assert all(setting.variable in line for setting in TABLE)


LISTENER = '[[listener]]\nprotocol = "phpmq"\naddress = "127.0.0.1:1"\n'


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ('\n\ndurability = "x"', "3: durability = 'x': use commit, interval or none"),
        ("durability = true", "1: durability = true: use commit, interval or none"),
        ("sspq = 8888", "1: sspq = 8888: use HOST:PORT, [IPV6]:PORT, unix:PATH or off"),
        (
            "socket-mode = 660",
            '1: socket-mode = 660: use three octal digits as chmod has them, as in "0660"',
        ),
        (
            'socket-mode = "1777"',
            "1: socket-mode = '1777': use three octal digits as chmod has them, as in \"0660\"",
        ),
        ("drain-seconds = nan", "1: drain-seconds = nan: use a number of seconds from 0 to 86400"),
        (
            'drain-seconds = "1"',
            "1: drain-seconds = '1': use a number of seconds from 0 to 86400, without quotes",
        ),
        (
            "[limits]\n# more\nqueues-max = true",
            "3: [limits] queues-max = true: use a whole number from 1 to 10000000",
        ),
        (
            'limits.queues-max = "7"',
            "1: [limits] queues-max = '7': use a whole number from 1 to 10000000, without quotes",
        ),
        (
            'data = """\nlimits = 1\n"""\nlimits = { connections-max = 1,\tqueues-max = 0 }',
            "4: [limits] queues-max = 0: use a whole number from 1 to 10000000",
        ),
        ("\r\nlog = 5\r\n", "2: log: it is a section; begin it with [log]"),
        ("drain_seconds = 1", "1: drain_seconds: there is no such setting; did you mean drain-seconds?"),
        (
            '"drain\\nseconds" = 1',
            "1: 'drain\\nseconds': there is no such setting; did you mean drain-seconds?",
        ),
        ("[limit]\n", "1: [limit]: there is no such setting; did you mean [limits]?"),
        ("listeners = 1", "1: listeners: there is no such setting; did you mean [[listener]]?"),
        ("[queues.a]", '1: [queues]: there is no such setting; did you mean [queue."PATTERN"]?'),
        (
            "connections-max = 1",
            "1: connections-max: there is no such setting; did you mean [limits] connections-max?",
        ),
        (
            "limits-connections-max = 1",
            "1: limits-connections-max: there is no such setting; did you mean [limits] connections-max?",
        ),
        (
            '[limits]\nqueues-max = 1\ndurability = "none"',
            "3: [limits] durability: there is no such setting;"
            " did you mean durability above the first [section]?",
        ),
        (
            '[log]\nlevel = "info"',
            "2: [log] level: there is no such setting; did you mean log-level above the first [section]?",
        ),
        (
            "[log]\nxyzzy = 1",
            "2: [log] xyzzy: there is no such setting; use one of [log] segment-bytes, [log] cache-bytes,"
            " [log] block-bytes, [log] interval-seconds, [log] snapshot-blocks,"
            " [log] reader-bytes-max, [log] disk-bytes-reserve",
        ),
        ("queue = 1", '1: queue: begin each one with [queue."PATTERN"]'),
        (
            "[queue.a]\nmax-bytes = 1\n[queue.b]\nmax-bytes = 1\nmax-deliveries = -1\non-expiry = 7",
            '5: [queue."b"]: max-deliveries = -1: use a whole number from 0 (no limit) to 2147483647',
        ),
        (
            '[queue."a*"]\n\nretention = 1',
            "3: [queue.\"a*\"]: there is no setting 'retention': did you mean retention-bytes?",
        ),
        (
            '[queue]\ndurability = "none"',
            "2: [queue.\"durability\"]: is 'none'; use a table of settings",
        ),
        (
            '\n[queue."a.dead"]\nmax-bytes = -1',
            '2: [queue."a.dead"]: dead letters follow the settings of their queue, [queue."a"]',
        ),
        ("[listener]\n", "1: listener: begin each one with [[listener]]"),
        ("listener = [1]", "1: listener: begin each one with [[listener]]"),
        (
            f"{LISTENER}\n[[listener]]\n",
            "5: [[listener]] 2: there is no protocol; add protocol = and sspq, phpmq or rq",
        ),
        (
            '[[listener]]\nprotocol = "rq"',
            "1: [[listener]] 1: there is no address; add address = and HOST:PORT, [IPV6]:PORT or unix:PATH",
        ),
        (
            '[[listener]]\nprotocol = "rq"\naddress = "off"',
            "3: [[listener]] 1 address = 'off': there is no port; use HOST:PORT, [IPV6]:PORT or unix:PATH",
        ),
        (
            f"{LISTENER}tls-cert = 1",
            "4: [[listener]] 1 tls-cert: there is no such setting; did you mean tls-certificate?",
        ),
        (
            f"{LISTENER}xyzzy = 1",
            "4: [[listener]] 1 xyzzy: there is no such setting; use one of protocol, address, queue,"
            " tls-certificate, tls-key, tls-client-ca, queues, mode, user, ttl-packet, consume",
        ),
        (
            f'{LISTENER}mode = "read-only"',
            "4: [[listener]] 1 mode = 'read-only': use both, send-only or receive-only",
        ),
        (
            f'{LISTENER}queue = "a"',
            "4: [[listener]] 1 queue: it is for sspq listeners, and this one is phpmq; leave it out",
        ),
        (
            '[[listener]]\nprotocol = "sspq"\naddress = "a:1"\nqueues = ["a"]',
            "4: [[listener]] 1 queues: it is for phpmq and rq listeners, and this one is sspq; leave it out",
        ),
        (
            f'{LISTENER}queues = "a"',
            "4: [[listener]] 1 queues = 'a': use a list of patterns, as in [\"orders.*\"]",
        ),
        (
            f"{LISTENER}queues = []",
            '4: [[listener]] 1 queues = []: use a list of patterns, as in ["orders.*"]',
        ),
        (
            f'{LISTENER}queues = ["a*", "*.dead"]',
            "4: [[listener]] 1 queues: queue '*.dead' cannot be sent to: it is the door to the dead letters"
            " of '*'; send to that queue",
        ),
        (
            f'{LISTENER}queues = [\n"a",\n"",\n]',
            "4: [[listener]] 1 queues: a queue name cannot be empty",
        ),
        (
            f'{LISTENER}tls-certificate = "a"',
            "4: [[listener]] 1 tls-certificate: it needs tls-key beside it; add that",
        ),
        (
            f'{LISTENER}tls-key = "a"',
            "4: [[listener]] 1 tls-key: it needs tls-certificate beside it; add that",
        ),
        (
            f'{LISTENER}tls-client-ca = "a"',
            "4: [[listener]] 1 tls-client-ca: it needs tls-certificate beside it; add that",
        ),
        (
            '[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:9100"',
            "1: [[listener]] 1: 127.0.0.1:9100 clashes with 127.0.0.1:9100 of phpmq (default);"
            " use another address, or turn phpmq off",
        ),
        (
            f"{LISTENER}{LISTENER}",
            "4: [[listener]] 2: 127.0.0.1:1 clashes with 127.0.0.1:1 of [[listener]] 1 (penstock.toml);"
            " use another address",
        ),
    ],
)
def test_wrong_files(read: Source, file: str, line: str) -> None:
    assert read.error(file=file) == f"penstock.toml, line {line}"


def test_what_is_overruled_is_checked_too(read: Source) -> None:
    assert "penstock.toml, line 1" in read.error("--durability none", 'durability = "x"')
    assert "PENSTOCK_DURABILITY" in read.error("--durability none", PENSTOCK_DURABILITY="x")


def test_files_that_are_none(read: Source, tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert read.error(f"--config {missing}") == (
        f"command line: --config = '{missing}': cannot be read (No such file or directory);"
        " name a file that can"
    )
    assert read.error(PENSTOCK_CONFIG=str(tmp_path)) == (
        f"environment: PENSTOCK_CONFIG = '{tmp_path}': cannot be read (Is a directory); name a file that can"
    )
    assert read.error(file="a = \n") == "penstock.toml: this is not TOML: Invalid value (at line 1, column 5)"
    assert read.error(file="data = 'a'\n\ndata = 'b'").startswith("penstock.toml: this is not TOML: ")
    assert read.error(file=f"a = {'9' * 5000}").startswith("penstock.toml: this is not TOML: ")
    assert read.error(file=f"a = {'[' * 50_000}").startswith("penstock.toml: this is not TOML: ")
    read.path.write_bytes(b'data = "\xff"')
    line = read.error(f"--config {read.path}")
    assert line == "penstock.toml: byte 8 is not UTF-8; save the file as UTF-8"


def test_the_error_is_for_users() -> None:
    assert issubclass(SettingsError, PenstockError)
    assert not issubclass(WrongValue, PenstockError)


TOML_BITS = [
    *(f"{setting.name} = " for setting in TABLE),
    *(f"{key.name} = " for key in (*LISTENER_KEYS, *HTTP_KEYS, *TOKEN_KEYS)),
    *("[limits]\n", "[log]\n", "[[listener]]\n", '[queue."a*"]\n', "[http]\n", "[[http.tokens]]\n", "http."),
    *("[", "]", "\n", "\r\n", "#", f'"{"x" * 16}"\n', '"0.0.0.0:1"\n', '"read"\n'),
    *('"', '"""', "1\n", "-1\n", '"off"\n', '"127.0.0.1:1"\n', '"rq"\n', "true\n", "{ a = 1 }\n", "[1]\n"),
]


@hypothesis_settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(TOML_BITS), max_size=12).map("".join))
def test_any_file_gives_settings_or_one_line(read: Source, text: str) -> None:
    line = ""
    try:
        settings = read(file=text)
    except SettingsError as error:
        line = str(error)
    else:
        assert settings == read(file=text)
    if line:
        assert line.startswith(str(read.path))
        number = re.match(", line ([0-9]+): ", line.removeprefix(str(read.path)))
        assert number is None or 1 <= int(number[1]) <= text.count("\n") + 1


# --- listeners ---


def test_a_listener_of_the_file_comes_after_those_of_the_table(read: Source) -> None:
    settings = read(
        "--sspq-queue mail --rq off",
        """
        listener = [
            { protocol = "sspq", address = "unix:/run/a.sock", queue = "log", mode = "send-only" },
        ]
        """,
    )
    assert [str(listener.address) for listener in settings.listeners] == [
        "127.0.0.1:8888",
        "127.0.0.1:9100",
        "unix:/run/a.sock",
    ]
    assert settings.listeners[0].queue == "mail"
    assert settings.listeners[2] == Listener(
        "sspq", UnixAddress("/run/a.sock"), queue="log", mode="send-only", setting="[[listener]] 1"
    )
    assert [listener.place for listener in settings.listeners] == ["default", "default", str(read.path)]


def test_everything_that_a_listener_can_say(read: Source) -> None:
    file = """
        phpmq = "off"
        [[listener]]
        protocol = "phpmq"
        address = "0.0.0.0:9100"
        tls-certificate = "c.pem"
        tls-key = "k.pem"
        tls-client-ca = "ca.pem"
        queues = ["a.*", "b"]
        mode = "receive-only"
        ttl-packet = "never"
        consume = "replace"
    """
    assert read("--sspq off --rq off", file).listeners == (
        Listener(
            protocol="phpmq",
            address=TcpAddress("0.0.0.0", 9100),
            tls_certificate="c.pem",
            tls_key="k.pem",
            tls_client_ca="ca.pem",
            queues=("a.*", "b"),
            mode="receive-only",
            ttl_packet="never",
            consume="replace",
            setting="[[listener]] 1",
        ),
    )


def test_any_number_of_listeners_can_have_a_free_port(read: Source) -> None:
    assert len(read("--sspq 127.0.0.1:0 --phpmq 127.0.0.1:0 --rq 127.0.0.1:0").listeners) == 3


@pytest.mark.parametrize(
    ("mode", "may_send", "may_receive"),
    [("both", True, True), ("send-only", True, False), ("receive-only", False, True)],
)
def test_modes(mode: str, may_send: bool, may_receive: bool) -> None:
    listener = Listener("rq", TcpAddress("a", 1), mode=mode)
    assert (listener.may_send, listener.may_receive) == (may_send, may_receive)


NAMES = st.text(alphabet="ab.[]!-*?", min_size=1, max_size=8)


@hypothesis_settings(max_examples=300, deadline=None)
@given(NAMES, NAMES)
def test_allowed_queues_are_matched_as_queue_sections_are(pattern: str, name: str) -> None:
    listener = Listener("rq", TcpAddress("a", 1), queues=("zz", pattern))
    policies = Policies({pattern: {"max-bytes": 7}})
    assert listener.allows(name) is (policies.for_queue(name).max_bytes == 7)


def test_dead_letters_are_as_open_as_their_queue() -> None:
    listener = Listener("rq", TcpAddress("a", 1), queues=("orders",))
    assert listener.allows("orders.dead")
    assert not listener.allows("mail.dead")
    assert Listener("rq", TcpAddress("a", 1)).allows("anything")


# --- queues ---


def test_queue_sections_lie_over_the_durability_of_the_broker(read: Source) -> None:
    file = '[queue."orders.*"]\nmax-deliveries = 5\n[queue.log]\ndurability = "none"\ndead-letters = "off"'
    policies = read("--durability interval", file).policies
    assert policies.for_queue("orders.eu") == QueuePolicy(durability="interval", max_deliveries=5)
    assert policies.for_queue("log") == QueuePolicy(durability="none", dead_letters=False)
    assert policies.for_queue("else") == QueuePolicy(durability="interval")


# --- reload ---


def test_reading_again_finds_what_changed(read: Source) -> None:
    old = read(file='[queue.a]\nmax-bytes = 1\n[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:1"')
    new = read(
        file='\n\n[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:1"\n[queue.a]\nmax-bytes = 2',
        PENSTOCK_DURABILITY="none",
    )
    reload = reloadable_difference(old, new)
    assert reload.policies is new.policies
    assert reload.policies.for_queue("a") == QueuePolicy(max_bytes=2, durability="none")
    assert reload.others == []


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", []),
        ("--durability none", []),
        ("--data a --log-level debug", ["data", "log-level"]),
        (
            "--limits-queues-max 5 --log-interval-seconds 1",
            ["[limits] queues-max", "[log] interval-seconds"],
        ),
        ("--sspq off", ["sspq"]),
        ("--sspq 127.0.0.1:1 --sspq-queue x", ["sspq"]),
        ("--sspq-queue x --rq unix:/x", ["sspq-queue", "rq"]),
    ],
)
def test_what_needs_a_restart(read: Source, words: str, names: list[str]) -> None:
    assert reloadable_difference(read(), read(words)).others == names


def test_listeners_of_the_file_need_a_restart(read: Source) -> None:
    one, two = read(file=LISTENER), read(file=f'{LISTENER}consume = "replace"')
    assert reloadable_difference(one, two).others == ["[[listener]] 1"]
    assert reloadable_difference(read(), one).others == ["[[listener]] 1"]
    assert reloadable_difference(one, read()).others == ["[[listener]] 1"]


def test_every_setting_reloads_or_needs_a_restart(read: Source) -> None:
    for setting in TABLE:
        values = [value for value in two_values(setting) if value != str(setting.default)]
        restart = [] if setting.reloads or not values else [setting.label]
        again = read(f"{setting.flag} {(*values, setting.default)[0]}")
        assert reloadable_difference(read(), again).others == restart


# --- the command line's help ---


def test_help_shows_every_setting_with_its_default() -> None:
    text = " ".join(parser().format_help().split())
    for setting in TABLE:
        shown = f"{setting.help} (default: {setting.default_text})"
        # argparse breaks lines within words that have hyphens.
        assert shown.replace(" ", "") in text.replace(" ", ""), setting.label
        assert f"{setting.flag} " in text or f"[{setting.flag}" in text


def test_completion_can_offer_words_and_paths() -> None:
    """`penstock completion` goes by choices, and by the metavars DIR and FILE."""
    actions = {action.option_strings[0]: action for action in parser()._actions}
    assert actions["--durability"].choices == ("commit", "interval", "none")
    assert actions["--rq"].choices is None
    wanted = {"--data": "DIR", "--config": "FILE", "--http": "ADDR", "--http-body-bytes-max": "N"}
    assert {flag: actions[flag].metavar for flag in wanted} == wanted
