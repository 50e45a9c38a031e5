"""The settings of the HTTP API: both forms of its address, tokens that are never shown, who may reach it."""

import re
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.common.address import TcpAddress, UnixAddress, parse_address
from penstock.common.given import SettingsError
from penstock.server.settings import HttpSettings, Settings, Token
from penstock.server.settings_http import warnings
from penstock.server.settings_read import reloadable_difference
from tests.server.settings_source import Source

SECRET, OTHER_SECRET = "!s3cret_of_grafana~", "another-s3cret-of-ours"
TOKEN = f'[[http.tokens]]\nname = "grafana"\nrole = "read"\ntoken = "{SECRET}"\n'
OTHER_TOKEN = f'[[http.tokens]]\nname = "ops"\nrole = "admin"\ntoken = "{OTHER_SECRET}"\n'
GRAFANA, OPS = Token("grafana", "read", SECRET), Token("ops", "admin", OTHER_SECRET)


@pytest.fixture
def read(tmp_path: Path) -> Source:
    return Source(tmp_path)


def http_of(settings: Settings) -> HttpSettings:
    assert settings.http is not None
    return settings.http


# --- where it is ---


@pytest.mark.parametrize("form", ['http = "{}"', '[http]\naddress = "{}"', 'http.address = "{}"'])
def test_a_file_has_two_forms_of_the_address(read: Source, form: str) -> None:
    assert http_of(read(file=form.format("127.0.0.1:1"))) == HttpSettings(TcpAddress("127.0.0.1", 1))
    assert http_of(read(file=form.format("unix:/a"))) == HttpSettings(UnixAddress("/a"))
    assert read(file=form.format("off")).http is None
    assert http_of(read("--http 127.0.0.1:3", form.format("off"))).address == TcpAddress("127.0.0.1", 3)
    assert read("--http off", form.format("127.0.0.1:1")).http is None
    named = read(file=form.format("off"), PENSTOCK_HTTP="[::1]:2")
    assert http_of(named).address == TcpAddress("::1", 2)


def test_everything_that_can_be_said(read: Source) -> None:
    file = f"""
        [http]
        address = "0.0.0.0:1"
        tls-certificate = "c.pem"
        tls-key = "k.pem"
        body-bytes-max = 1024
        metrics-queues-max = 0
        stage-seconds = 60
        stages-bytes-max = 2048
        lease-seconds-max = 5
        readers-max = 7
        {TOKEN}
        {OTHER_TOKEN}
    """
    settings = read(file=file)
    # What the log is to do with what is staged stands here too.
    assert (settings.log.stage_seconds, settings.log.stages_bytes_max) == (60, 2048)
    assert read("--http off --http-stage-seconds 61").log.stage_seconds == 61
    http = http_of(settings)
    assert http == HttpSettings(
        address=TcpAddress("0.0.0.0", 1),
        tokens=(GRAFANA, OPS),
        tls_certificate="c.pem",
        tls_key="k.pem",
        body_bytes_max=1024,
        metrics_queues_max=0,
        lease_seconds_max=5,
        readers_max=7,
    )
    assert http.place == str(read.path)
    assert http_of(read("--http-body-bytes-max 4096", file)).body_bytes_max == 4096
    assert http_of(read(file=file, PENSTOCK_HTTP_READERS_MAX="9")).readers_max == 9


def test_a_file_can_have_tokens_and_leave_the_address_to_its_default(read: Source) -> None:
    assert http_of(read(file=TOKEN)) == HttpSettings(tokens=(GRAFANA,))
    inline = f'http = {{ tokens = [{{ name = "grafana", role = "read", token = "{SECRET}" }}] }}'
    assert read(file=inline) == read(file=TOKEN)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("\nhttp = 5", "2: http = 5: use HOST:PORT, [IPV6]:PORT, unix:PATH or off"),
        (
            '[http]\n\naddress = "9180"',
            "3: [http] address = '9180': there is no port; use HOST:PORT, [IPV6]:PORT or unix:PATH; or off",
        ),
        (
            "[http]\nbody-bytes-max = 1000",
            "2: [http] body-bytes-max = 1000: use a whole number from 1024 to 1073741824",
        ),
        (
            '[http]\nreaders-max = "7"',
            "2: [http] readers-max = '7': use a whole number from 0 to 1000000, without quotes",
        ),
        (
            "[http]\nbody-bytes = 1",
            "2: [http] body-bytes: there is no such setting; did you mean [http] body-bytes-max?",
        ),
        (
            '[http]\nadress = "off"',
            "2: [http] adress: there is no such setting; did you mean [http] address?",
        ),
        (
            '[http]\nhttp = "off"',
            "2: [http] http: there is no such setting; did you mean [http] address?",
        ),
        (
            "[http]\nxyzzy = 1",
            "2: [http] xyzzy: there is no such setting; use one of [http] body-bytes-max,"
            " [http] bodies-bytes-max, [http] connections-max,"
            " [http] metrics-queues-max, [http] health-seconds, [http] history-days, [http] stage-seconds,"
            " [http] stages-bytes-max, [http] lease-seconds-max, [http] readers-max, [http] address,"
            " [http] tls-certificate, [http] tls-key, [[http.tokens]]",
        ),
        (
            "body-bytes-max = 1",
            "1: body-bytes-max: there is no such setting; did you mean [http] body-bytes-max?",
        ),
        ('[http]\ntls-key = "a"', "2: [http] tls-key: it needs tls-certificate beside it; add that"),
        ('[http]\ntls-certificate = "a"', "2: [http] tls-certificate: it needs tls-key beside it; add that"),
        (
            '[http]\ntls-certificate = ""',
            "2: [http] tls-certificate = '': use a file in PEM form",
        ),
        (
            '[http]\naddress = { b = "c" }',
            "2: [http] address = {...}: use HOST:PORT, [IPV6]:PORT, unix:PATH or off",
        ),
        ("[[http]]\n", "1: http: it is a section; begin it with [http]"),
        (
            'http = "127.0.0.1:9100"',
            "1: http: 127.0.0.1:9100 clashes with 127.0.0.1:9100 of phpmq (default);"
            " use another address, or turn phpmq off",
        ),
        (
            '\n[http]\naddress = "[::1]:1"\n[[listener]]\nprotocol = "rq"\naddress = "[::1]:1"',
            "3: [http] address: [::1]:1 clashes with [::1]:1 of [[listener]] 1 (penstock.toml);"
            " use another address",
        ),
        (
            '[[listener]]\nprotocol = "rq"\naddress = "0.0.0.0:9180"',
            "1: [[listener]] 1: 0.0.0.0:9180 clashes with 127.0.0.1:9180 of http (default);"
            " use another address, or turn http off",
        ),
    ],
)
def test_wrong_files(read: Source, file: str, line: str) -> None:
    assert read.error(file=file) == f"penstock.toml, line {line}"


def test_clashes_of_flags(read: Source) -> None:
    assert read.error("--sspq unix:/a --http unix:/a") == (
        "command line: --http: unix:/a clashes with unix:/a of sspq (command line);"
        " use another address, or turn sspq off"
    )
    assert read("--sspq 127.0.0.1:9180 --http off").http is None


@pytest.mark.parametrize(
    "file",
    [
        f'http = "0.0.0.0:9180"\n{TOKEN}',
        'http = "127.0.0.1:9180"\n[limits]\n[http]\nreaders-max = 1',
        'http = "127.0.0.1:9180"\nhttp.readers-max = 1',
    ],
)
def test_both_forms_at_once_get_a_hint(read: Source, file: str) -> None:
    line = read.error(file=file)
    assert line.startswith("penstock.toml: this is not TOML: ")
    assert line.endswith("; with [http], write http = as address = under it")
    assert SECRET not in line


@pytest.mark.parametrize(
    ("variable", "instead"),
    [
        ("PENSTOCK_HTTP_TOKENS", "[[http.tokens]] in the file"),
        ("PENSTOCK_HTTP_TOKEN", "[[http.tokens]] in the file"),
        ("PENSTOCK_HTTP_TLS_KEY", "[http] tls-key in the file"),
        ("PENSTOCK_HTTP_TLS_CERTIFICATE", "[http] tls-certificate in the file"),
    ],
)
def test_variables_for_what_only_a_file_can_say(read: Source, variable: str, instead: str) -> None:
    assert read.error(**{variable: SECRET}) == (
        f"environment: {variable}: there is no such setting; did you mean {instead}?"
    )


# --- tokens ---


def test_a_token_is_not_shown(read: Source) -> None:
    settings = read(file=TOKEN)
    assert repr(GRAFANA) == "Token(name='grafana', role='read')"
    for shown in (repr(settings), str(settings), repr(reloadable_difference(settings, settings))):
        assert SECRET not in shown
        assert "grafana" in shown


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (TOKEN.partition("token = ")[0], "1: {} 1: there is no token; add token = and {wanted}"),
        (
            f'[[http.tokens]]\nname = "a"\ntoken = "{SECRET}"',
            "1: {} 1: there is no role; add role = and read, operate or admin",
        ),
        (
            f'[[http.tokens]]\nrole = "read"\ntoken = "{SECRET}"',
            "1: {} 1: there is no name; add name = and 1 to 64 letters, digits and any of . _ -",
        ),
        (
            TOKEN.replace('"read"', '"write"'),
            "3: {} 1 role = 'write': use read, operate or admin",
        ),
        (
            TOKEN.replace('"grafana"', '"a b"'),
            "2: {} 1 name = 'a b': use 1 to 64 letters, digits and any of . _ -",
        ),
        (TOKEN.replace(SECRET, SECRET[:15]), "4: {} 1 token: use {wanted}"),
        (TOKEN.replace(SECRET, f"{SECRET} x"), "4: {} 1 token: use {wanted}"),
        (TOKEN.replace(SECRET, f"{SECRET}é"), "4: {} 1 token: use {wanted}"),
        (TOKEN.replace(SECRET, f"{SECRET}\\n"), "4: {} 1 token: use {wanted}"),
        (TOKEN.replace(f'"{SECRET}"', "1234567890123456"), "4: {} 1 token: use {wanted}"),
        (TOKEN.replace(f'"{SECRET}"', f'["{SECRET}"]'), "4: {} 1 token: use {wanted}"),
        (TOKEN.replace("token =", "tokn ="), "4: {} 1 tokn: there is no such setting; did you mean token?"),
        (TOKEN.replace("[[http.tokens]]", "[http.tokens]"), "1: http.tokens: begin each one with {}"),
        (f'[http]\ntokens = ["{SECRET}"]', "2: http.tokens: begin each one with {}"),
        (f'[http]\ntokens = "{SECRET}"', "2: http.tokens: begin each one with {}"),
        (f'[http]\ntoken = "{SECRET}"', "2: [http] token: there is no such setting; did you mean {}?"),
        (f'token = "{SECRET}"', "1: token: there is no such setting; did you mean {}?"),
        (f"[[http]]\n{TOKEN}", "1: http: it is a section; begin it with [http]"),
        (TOKEN + OTHER_TOKEN.replace("ops", "grafana"), "6: {} 2 name: {} 1 has the same; use another"),
        (TOKEN + OTHER_TOKEN.replace(OTHER_SECRET, SECRET), "8: {} 2 token: {} 1 has the same; use another"),
        (
            TOKEN + '[[listener]]\nprotocol = "rq"\naddress = "a:1"\n\n[[http.tokens]]\nname = "x"\nrole = 1',
            "11: {} 2 role = 1: use read, operate or admin",
        ),
    ],
)
def test_wrong_tokens(read: Source, file: str, line: str) -> None:
    wanted = "at least 16 printable ASCII characters without blanks"
    line = line.replace("{}", "[[http.tokens]]").replace("{wanted}", wanted)
    assert read.error(file=file) == f"penstock.toml, line {line}"
    # Tokens are judged also where the API is off.
    assert read.error("--http off", file) == f"penstock.toml, line {line}"


BITS = [
    *("address = ", "readers-max = ", "tls-key = ", "name = ", "role = ", "token = "),
    *("[http]\n", "[[http.tokens]]\n", "[[http]]\n", "http.", "http = ", "[limits]\n", "[[listener]]\n"),
    *('name = "a"\n', 'name = "b"\n', 'role = "read"\n', "role = 1\n", "[log]\n", "{ ", " }", "[", "]", ", "),
    *(f'token = "{SECRET}"\n', f'token = "{SECRET}', f'tokens = ["{SECRET}"]\n', f'password = "{SECRET}"\n'),
    *(f'{{ token = "{SECRET}" }}', f'{{ name = "a", role = "read", token = "{SECRET}" }}', '"', "\n", "= "),
]


@hypothesis_settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(BITS), max_size=10).map("".join))
def test_no_error_shows_a_token(read: Source, text: str) -> None:
    try:
        shown = repr(read(file=text))
    except SettingsError as error:
        shown = "".join(format_exception(error))
    assert SECRET not in shown


# --- who can reach it ---


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "127.3.2.1:1", "[::1]:1", "[0::1]:1", "localhost:1", "LocalHost.:1", "unix:/a", "unix:a"],
)
def test_without_tokens_this_machine_can_reach_it(read: Source, address: str) -> None:
    settings = read(f"--http {address}")
    assert http_of(settings).address == parse_address(address)
    assert warnings(settings) == []


ADVICE = "a [[user]] with one (penstock token new NAME)"


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:1",
        "[::]:1",
        "10.0.0.1:1",
        "[::ffff:127.0.0.1]:1",
        "128.0.0.1:1",
        "localhost.example:1",
        "a:1",
    ],
)
def test_without_tokens_nobody_else_can(read: Source, address: str) -> None:
    shown = str(parse_address(address))
    problem = f"{shown} can be reached by others, and there is no token to keep them out; add {ADVICE}"
    assert read.error(f"--http {address}") == f"command line: --http: {problem}, or use 127.0.0.1:1"
    assert read.error(PENSTOCK_HTTP=address) == f"environment: PENSTOCK_HTTP: {problem}, or use 127.0.0.1:1"
    assert read.error(file=f'\n[http]\naddress = "{address}"') == (
        f"penstock.toml, line 3: [http] address: {problem}, or use 127.0.0.1:1"
    )
    assert read.error(file=f'\nhttp = "{address}"') == (
        f"penstock.toml, line 2: http: {problem}, with this as address under [http], or use 127.0.0.1:1"
    )
    assert http_of(read(f"--http {address}", TOKEN)).tokens == (GRAFANA,)


def test_without_tls_others_can_reach_it_and_there_is_a_warning(read: Source) -> None:
    plain = read("--http 0.0.0.0:1", TOKEN)
    (line,) = warnings(plain)
    assert line == (
        "http: 0.0.0.0:1 can be reached by others, and tokens travel there unencrypted;"
        " set tls-certificate and tls-key under [http], unless a proxy with TLS stands before it"
    )
    tls = '[http]\ntls-certificate = "c"\ntls-key = "k"\n'
    assert warnings(read("--http 0.0.0.0:1", tls + TOKEN)) == []
    assert warnings(read("--http 127.0.0.1:1", TOKEN)) == []
    assert warnings(read("--http off", TOKEN)) == []
    # TLS alone keeps nobody out.
    assert f"add {ADVICE}" in read.error("--http 0.0.0.0:1", tls)


# --- reading again ---


def test_tokens_are_in_force_at_once(read: Source) -> None:
    none, one, both = read(file=""), read(file=TOKEN), read(file=TOKEN + OTHER_TOKEN)
    for old in (none, one, both):
        for new in (none, one, both):
            reload = reloadable_difference(old, new)
            assert reload.tokens == http_of(new).tokens
            assert reload.others == []
            assert reload.policies is new.policies


def test_an_open_door_does_not_lose_its_last_token(read: Source) -> None:
    old = read("--http 0.0.0.0:1", TOKEN)
    reload = reloadable_difference(old, read("--http 127.0.0.1:1"))
    assert reload.tokens == (GRAFANA,)
    assert reload.others == ["http", "[[http.tokens]]"]
    # But others can come in its place, wherever the next start listens.
    reload = reloadable_difference(old, read("--http 127.0.0.1:1", OTHER_TOKEN))
    assert reload.tokens == (OPS,)
    assert reload.others == ["http"]


@pytest.mark.parametrize(
    ("old", "new", "others"),
    [
        ({}, {"address": TcpAddress("127.0.0.1", 1)}, ["http"]),
        (None, {}, ["http"]),
        ({}, None, ["http"]),
        ({"readers_max": 1}, None, ["http"]),
        (None, None, []),
        ({}, {"readers_max": 1, "body_bytes_max": 2048}, ["[http] body-bytes-max", "[http] readers-max"]),
        (
            {},
            {"tls_certificate": "a", "tls_key": "b"},
            ["[http] tls-certificate", "[http] tls-key"],
        ),
        (
            {"tls_certificate": "a", "tls_key": "b"},
            {"tls_certificate": "a", "tls_key": "c"},
            ["[http] tls-key"],
        ),
        ({"place": "a"}, {"place": "b"}, []),
    ],
)
def test_the_rest_needs_a_restart(
    read: Source, old: dict[str, Any] | None, new: dict[str, Any] | None, others: list[str]
) -> None:
    one, two = (
        replace(read(), http=None if it is None else replace(HttpSettings(), **it)) for it in (old, new)
    )
    reload = reloadable_difference(one, two)
    assert reload.others == others
    assert reload.tokens == ()


# --- the documented bounds ---


def test_the_reference_says_both_forms_and_they_work(read: Source) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    top, inner = re.findall(r"^\|.*\| `(.+? = \"127\.0\.0\.1:9180\")` .*\|$", docs, re.MULTILINE)
    assert http_of(read(file=top)) == http_of(read(file=f"[http]\n{inner}")) == HttpSettings()
