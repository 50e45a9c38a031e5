"""`penstock top` on a terminal of its own, with a real broker: what a person sees, and what keys do."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.top.help import KEYS
from tests.cli.terminal import COMMAND, ENVIRONMENT
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.morgue import expire, path_of, phpmq, reasons, reject, take
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until
from tests.top.screen import Screen, without

ESCAPE, ENTER, CONTROL_C, CONTROL_Z = "\x1b", "\r", "\x03", "\x1a"

TOKENS = """
[[http.tokens]]
name = "viewer"
role = "read"
token = "0123456789abcdef0123456789abcdef"
"""
OPERATOR = """
[[http.tokens]]
name = "operator"
role = "operate"
token = "fedcba9876543210fedcba9876543210"
"""


def url_of(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


@pytest.fixture(scope="module")
def url(broker: BrokerProcess) -> str:
    return url_of(broker)


@pytest.fixture
def stocked(_stock: None, api: Api) -> Api:
    """A caller of the broker, which has queues for the tests that only look."""
    return api


@pytest.fixture(scope="module")
def _stock(broker: BrokerProcess) -> None:
    with Api(broker.ports["http"]) as api:
        api.send("look.apples", b"1", b"2", b"3")
        api.send("look.pears", *[b'{"pear": %d}' % number for number in range(12)])
        api.send("look.plums", b"only")
        reject(broker, api, "look.pears", [b"bad 1", b"bad 2"])
        expire(api, "look.plums", [b"late"])
        api.post(path_of("look.plums", "pause"))


def names(screen: Screen) -> list[str]:
    """The queues on the screen, from top to bottom."""
    return re.findall(r"^ (look\.\w+)", screen.text, re.MULTILINE)


# --- the overview --------------------------------------------------------------------------------------


@pytest.mark.long
def test_numbers_are_those_of_the_api(broker: BrokerProcess, stocked: Api, url: str) -> None:
    with phpmq(broker) as mq:
        held = mq.consume("look.apples", prefetch=2, timeout=WAIT_SECONDS)
        next(held)
        with Screen("top", "look.*", "--url", url) as screen:
            screen.wait(lambda it: it.cells_of("look.apples")[:2] == ["1", "2"], "what is held")
            for name in ("look.apples", "look.pears", "look.plums"):
                queue = stocked.get(path_of(name))
                cells = screen.cells_of(name)
                if queue["paused"]:
                    assert cells.pop(0) == "paused"
                assert [int(cell) for cell in cells[:3]] == [queue["ready"], queue["held"], queue["dead"]]
                # The age of the oldest is two words: a number and its unit, or more.
                assert int(re.split(r"\d [smhd]", screen.line_of(name))[-1].split()[0]) == queue["consumers"]
            queues = stocked.get("/v1/queues", match="look.*")["queues"]
            backlog = sum(queue["ready"] + queue["held"] for queue in queues)
            assert f"backlog {backlog}  dead 3" in screen.text
            assert "connections 1" in screen.text
            assert f"{url}  3 queues" in screen.lines[0]
            assert screen.lines[0].endswith("● live")
            stocked.send("look.apples", b"4")
            screen.wait(lambda it: it.cells_of("look.apples")[0] == "2", "one more message")


def test_everything_that_matters_fits_on_a_small_terminal(stocked: Api, url: str) -> None:
    with Screen("top", "look.*", "--url", url, lines=24, columns=80) as screen:
        screen.wait_text("q quit")
        heading = screen.line_of("QUEUE").split()
        assert heading == ["QUEUE▲", "READY", "HELD", "DEAD", "IN/S", "OUT/S", "OLDEST", "CONS", "TREND"]
        for key in ("Enter open", "s sort", "S reverse", "/ filter", "p pause", "r redrive", "q quit"):
            assert key in screen.lines[-1]


def test_sorting(stocked: Api, url: str) -> None:
    with Screen("top", "look.*", "--url", url) as screen:
        screen.wait(lambda it: names(it) == ["look.apples", "look.pears", "look.plums"], "names upwards")
        screen.type("S")
        screen.wait(lambda it: names(it) == ["look.plums", "look.pears", "look.apples"], "names downwards")
        screen.wait_text("QUEUE▼")
        screen.type("s")
        screen.wait(lambda it: names(it) == ["look.pears", "look.apples", "look.plums"], "most ready first")
        screen.wait_text("READY▼")
        screen.type("S")
        screen.wait(lambda it: names(it) == ["look.plums", "look.apples", "look.pears"], "the least first")
        screen.wait_text("READY▲")
    with Screen("top", "look.*", "--sort", "dead", "--url", url) as screen:
        screen.wait(lambda it: names(it) == ["look.pears", "look.plums", "look.apples"], "most dead first")


def test_help(stocked: Api, url: str) -> None:
    with Screen("top", "look.*", "--url", url) as screen:
        screen.wait_text("? help")
        screen.type("?")
        screen.wait_text("Esc closes this")
        for keys, meaning in KEYS:
            assert keys in screen.text
            assert meaning in screen.text
        screen.type(ESCAPE)
        screen.wait(lambda it: "Esc closes this" not in it.text, "the queues again")
        screen.type(ENTER)
        screen.wait_text("max-deliveries")
        screen.type("?")
        screen.wait_text("Esc closes this")
        screen.type("q")  # ends the help, and not the program
        screen.wait(lambda it: "Esc closes this" not in it.text, "the queue again")
        screen.type(ESCAPE)
        screen.wait_text("look.plums")


def test_filtering(stocked: Api, url: str) -> None:
    with Screen("top", "look.*", "--url", url) as screen:
        screen.wait_text("look.plums")
        screen.type("/P")
        screen.wait_text("filter 3 of 3 queues")
        screen.type("L")
        screen.wait(lambda it: names(it) == ["look.apples", "look.plums"], "names with pl in them")
        screen.wait_text("Enter keep the filter")
        screen.type(ENTER)
        screen.wait_text("filter PL  2 of 3 queues")
        # Keys are commands again, and go to what is shown.
        screen.type("S")
        screen.wait(lambda it: names(it) == ["look.plums", "look.apples"], "the filtered ones, reversed")
        screen.type(ESCAPE)
        screen.wait(lambda it: len(names(it)) == 3, "all again")
        screen.wait(lambda it: "of 3 queues" not in it.text, "no word about a filter")
        screen.type("/zzz")
        screen.wait_text("filter 0 of 3 queues")
        screen.type(ESCAPE)
        screen.wait(lambda it: len(names(it)) == 3, "all again, from within the entry")


@pytest.mark.long
def test_no_queue(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Screen("top", "--url", url_of(broker)) as screen:
        screen.wait_text("there is no queue yet")
        screen.type("pr" + ENTER)  # which have nothing to work on
        with Api(broker.ports["http"]) as api:
            api.send("first", b"")
        screen.wait(lambda it: it.cells_of("first")[:1] == ["1"], "the first queue")
        screen.wait(lambda it: "there is no queue" not in it.text, "no word about it")
        assert "DELAYED" not in screen.text
        with Api(broker.ports["http"]) as api:
            api.send("first", b"", b"", delay=600)
        screen.wait(lambda it: it.cells_of("first")[:3] == ["1", "0", "2"], "a column for what is delayed")
        assert "DELAYED" in screen.text
    with Screen("top", "none*", "--url", url_of(broker)) as screen:
        screen.wait_text("there is no queue named like none*")


# --- one queue -----------------------------------------------------------------------------------------


def test_a_queue_is_opened_and_left(broker: BrokerProcess, stocked: Api, url: str) -> None:
    with phpmq(broker) as mq, Screen("top", "look.*", "--url", url, lines=50, columns=120) as screen:
        screen.wait_text("look.pears")
        screen.type("j" + ENTER)  # the second
        screen.wait_text("Esc back")
        screen.wait_text("no consumers")
        queue = stocked.get(path_of("look.pears"))
        for name in ("ready", "held", "dead"):
            assert re.search(rf"^ {name} +{queue[name]}\b", screen.text, re.MULTILINE), screen.text
        assert re.search(rf"offsets +0 to {queue['offset_end'] - 1}\b", screen.text)
        assert re.search(r"retention-seconds +1 d\b", screen.text)
        assert re.search(r"^ rejected +2\b", screen.text, re.MULTILINE)
        for message in stocked.get(path_of("look.pears", "messages"))["messages"]:
            assert re.search(rf" {message['offset']}  {message['state']}", screen.text), message
        assert '{"pear": 11}' in screen.text
        assert screen.text.index("bad 2") < screen.text.index('{"pear": 11}')  # the newest first

        list(mq.consume("look.pears", prefetch=1, count=1, timeout=WAIT_SECONDS))
        screen.wait_text("phpmq  ")
        screen.wait_text("held by ")
        screen.type(ESCAPE)
        screen.wait(lambda it: len(names(it)) == 3, "the overview")


def test_it_scrolls_to_the_last_messages(stocked: Api, url: str) -> None:
    with Screen("top", "look.pears", "--url", url) as screen:
        screen.wait_text("look.pears")
        screen.type(ENTER)
        screen.wait_text("Esc back")
        assert '{"pear": 0}' not in screen.text
        screen.type("G")
        screen.wait_text('{"pear": 0}')
        screen.type("g")
        screen.wait_text("durability")


MARKUP = "[bold red]x[/] [@click=app.quit]y[/] $z"
PAYLOAD = b"[blink]a[/blink] [/] \x1b[2J\x1b]0;title\x07 <script>\r\nb\xc2\x9b31m \xe2\x80\xae"


def test_markup_and_escape_sequences_stay_text(broker: BrokerProcess, api: Api, url: str) -> None:
    api.send(MARKUP, PAYLOAD)
    reject(broker, api, MARKUP, [b"[green]dead"])
    with Screen("top", "[[]bold*", "--url", url, columns=200, lines=50) as screen:
        screen.wait_text("there is no queue named like [[]bold*")
    with Screen("top", "?bold*", "--url", url, columns=200, lines=50) as screen:
        screen.wait_text(MARKUP)
        screen.type(ENTER)
        screen.wait_text("Esc back")
        screen.wait_text(MARKUP)
        screen.wait_text(r"[blink]a[/blink] [/] \x1b[2J\x1b]0;title\x07 <script>\r\nb\x9b31m \u202e")
        assert "[green]dead" in screen.text
        screen.type("p")
        screen.wait_text(f"Pause {MARKUP}?")
        screen.type("y")
        screen.wait_text(f"{MARKUP} is paused")
        screen.type("q")
        assert screen.end() == 0
    assert "\x1b]0;title" not in screen.seen
    assert "\x1b[5m" not in screen.seen


# --- what keys do --------------------------------------------------------------------------------------


def test_dead_letters_are_redriven_by_a_key(broker: BrokerProcess, api: Api, url: str) -> None:
    reject(broker, api, "redrive.me", [b"1", b"2", b"3"])
    with Screen("top", "redrive.*", "--url", url) as screen:
        screen.wait(lambda it: it.cells_of("redrive.me")[:3] == ["0", "0", "3"], "three dead letters")
        screen.type("r")
        screen.wait_text("Put 3 dead letters of redrive.me back")
        screen.type("n")
        screen.wait(lambda it: "Put 3" not in it.text, "no question any more")
        assert reasons(api, "redrive.me") == {"rejected": 3}
        screen.type("r")
        screen.wait_text("Put 3 dead letters of redrive.me back")
        screen.type("y")
        screen.wait_text("redrive.me: redriven 3 dead letters")
        screen.wait(lambda it: it.cells_of("redrive.me")[:3] == ["3", "0", "0"], "three ready messages")
        screen.type("r")
        screen.wait_text("redrive.me has no dead letters to redrive")
    assert take(broker, "redrive.me", 3, lambda message: message.ack()) == [b"1", b"2", b"3"]


def test_a_queue_is_paused_and_resumed_by_a_key(api: Api, url: str) -> None:
    api.send("pause.me", b"1")
    with Screen("top", "pause.*", "--url", url) as screen:
        screen.wait_text("pause.me")
        screen.type("p")
        screen.wait_text("Pause pause.me?")
        screen.type("y")
        screen.wait(lambda it: it.cells_of("pause.me")[:1] == ["paused"], "the mark")
        assert api.get(path_of("pause.me"))["paused"] is True
        screen.type(ENTER)  # the same key on the queue's own screen
        screen.wait_text("Esc back")
        screen.wait_text("pause.me  paused")
        screen.type("p")
        screen.wait_text("Hand out messages of pause.me again?")
        screen.type("y")
        screen.wait_text("pause.me is not paused")
        until(lambda: not api.get(path_of("pause.me"))["paused"], "the queue to go on")


def test_a_token_that_may_only_read(start_broker: StartBroker, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(TOKENS + OPERATOR)
    broker = start_broker("--config", str(tmp_path / "penstock.toml"))
    viewer, operator = re.findall(r'token = "(\w+)"', TOKENS + OPERATOR)
    with Api(broker.ports["http"], operator) as api:
        reject(broker, api, "watched", [b"1"])
        with Screen("top", "--url", url_of(broker), around={"PENSTOCK_TOKEN": viewer}) as screen:
            screen.wait(lambda it: it.cells_of("watched")[:3] == ["0", "0", "1"], "the queue")
            screen.type("r")
            screen.wait_text("operate")  # which role it takes
            screen.type("p")
            screen.wait_text("Pause watched?")
            screen.type("y")
            screen.wait(lambda it: it.text.count("operate") == 2, "that the API has said no again")
        queue = api.get(path_of("watched"))
        assert (queue["dead"], queue["paused"]) == (1, False)


# --- a broker that is not there -------------------------------------------------------------------------


def test_it_comes_back_with_the_broker(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"1")
    port = broker.ports["http"]
    with Screen("top", "--url", url_of(broker)) as screen:
        screen.wait(lambda it: it.cells_of("orders")[:1] == ["1"], "the queue")
        broker.kill()
        screen.wait_text("○ trying again")
        assert str(port) in screen.lines[1]
        assert screen.cells_of("orders")[:1] == ["1"]  # what was known stays
        screen.type("r")
        screen.wait_text("could be reached")
        broker = start_broker("--http", f"127.0.0.1:{port}")
        screen.wait_text("● live")
        with Api(port) as api:
            api.send("orders", b"2")
        screen.wait(lambda it: it.cells_of("orders")[:1] == ["2"], "a message of the new broker")
        assert "○" not in screen.text


@pytest.mark.long
def test_a_broker_that_is_silent(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Screen("top", "--url", url_of(broker)) as screen:
        screen.wait_text("● live")
        broker.signal(signal.SIGSTOP)
        try:
            screen.wait_text("○ no answer for")
            screen.type("q")  # which waits for nobody
            assert screen.end() == 0
        finally:
            broker.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("address", "code", "complaint"),
    [
        ("http://127.0.0.1:1", 1, "penstock: http://127.0.0.1:1: no http broker could be reached"),
        ("http://", 2, "penstock top: 'http://': a host is missing"),
    ],
)
@pytest.mark.long
def test_a_wrong_address(address: str, code: int, complaint: str) -> None:
    with Screen("top", "--url", address) as screen:
        assert screen.end() == code
        assert screen.seen.startswith(complaint)
        assert screen.seen.count("\n") == 1
        assert "\x1b" not in screen.seen


def test_a_wrong_token(start_broker: StartBroker, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(TOKENS)
    broker = start_broker("--config", str(tmp_path / "penstock.toml"))
    with Screen("top", "--url", url_of(broker), "--token", "wrong") as screen:
        assert screen.end() == 1
        assert screen.seen.startswith(f"penstock: {url_of(broker)}: ")
        assert "--token-file, or PENSTOCK_TOKEN" in screen.seen
        assert screen.seen.count("\n") == 1
        assert "\x1b" not in screen.seen


# --- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "code"),
    [("q", 0), (CONTROL_C, 0), (signal.SIGINT, 0), (signal.SIGTERM, 143)],
    ids=["q", "Ctrl-C", "SIGINT", "SIGTERM"],
)
def test_the_terminal_is_as_it_was(url: str, way: str | signal.Signals, code: int) -> None:
    with Screen("top", "--url", url) as screen:
        before = screen.settings()
        screen.wait_text("● live")
        assert screen.settings() != before
        assert screen.modes_left() >= {"1049", "25"}
        if isinstance(way, str):
            screen.type(way)
        else:
            screen.signal(way)
        assert screen.end() == code
        assert screen.modes_left() == set()
        assert screen.settings() == before
        # The keyboard, too, has as many ends as beginnings.
        assert screen.seen.count("\x1b[<u") == len(re.findall(r"\x1b\[>\d+u", screen.seen))
        assert "Traceback" not in screen.seen


def test_it_stops_and_goes_on_as_shells_have_it(url: str) -> None:
    with Screen("top", "--url", url) as screen:
        screen.wait_text("● live")
        screen.type(CONTROL_Z)
        screen.wait(lambda it: it.stopped and not it.modes_left(), "the stop, with the terminal in order")
        assert screen.settings() == screen.settings_before
        screen.signal(signal.SIGCONT)
        screen.wait(lambda it: "1049" in it.modes_left(), "the screen again")
        screen.type("q")
        assert screen.end() == 0


@pytest.mark.long
def test_ctrl_c_ends_it_from_everywhere(stocked: Api, url: str) -> None:
    for keys, shown in ((ENTER, "Esc back"), ("p", "Pause look"), ("/", "filter 3 of 3")):
        with Screen("top", "look.*", "--url", url) as screen:
            screen.wait_text("look.apples")
            screen.type(keys)
            screen.wait_text(shown)
            screen.type(CONTROL_C)
            assert screen.end() == 0
            assert screen.modes_left() == set()


# --- colours -------------------------------------------------------------------------------------------


def test_colours_are_those_of_the_terminal(stocked: Api, url: str) -> None:
    with Screen("top", "look.*", "--url", url) as screen:
        screen.wait_text("q quit")
        # By their names only, none by its red, green and blue.
        assert {"red", "green"} <= screen.colours() <= {"red", "green", "brown", "blue", "cyan"}


def test_no_color(stocked: Api, url: str) -> None:
    with Screen("top", "look.*", "--url", url, around={"NO_COLOR": "1"}) as screen:
        screen.wait_text("q quit")
        assert screen.colours() == set()
        assert "paused" in screen.text


# --- without a screen ----------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "top", *arguments],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


def test_not_a_terminal(url: str) -> None:
    ended = run("--url", url)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "penstock top: this is no terminal; use `penstock queues --watch`, or `--json` for one snapshot\n"
    )


def test_a_terminal_that_cannot_draw(url: str) -> None:
    with Screen("top", "--url", url, around={"TERM": "dumb"}) as screen:
        assert screen.end() == 2
        assert screen.seen.startswith("penstock top: this terminal cannot be drawn on (TERM is dumb); use")


def test_a_snapshot_for_programs(stocked: Api, url: str) -> None:
    ended = run("look.*", "--json", "--sort", "dead", "--url", url)
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    told = json.loads(line)
    assert told["url"] == url
    assert told["version"] == stocked.get("/v1/engine")["version"]
    assert [queue["name"] for queue in told["queues"]] == ["look.pears", "look.plums", "look.apples"]
    assert set(told["queues"][0]) == set(stocked.get("/v1/queues", match="look.pears")["queues"][0])
    assert told["total"]["dead"] == 3
    assert told["total"]["connections"] == 0


def test_without_textual(tmp_path: Path) -> None:
    with Screen("top", around=without("textual", tmp_path)) as screen:
        assert screen.end() == 1
        assert screen.seen == "penstock: `penstock top` needs Textual: pip install 'penstock[dashboard]'\r\n"


def test_the_other_commands_do_without_textual(tmp_path: Path, url: str) -> None:
    program = (
        "import sys; from penstock.cli.main import main; main(['--help']); "
        "main(['top', '--json', '--url', sys.argv[1]]); assert not {'rich', 'textual'} & {*sys.modules}"
    )
    ended = subprocess.run(
        [COMMAND[0], "-c", program, url],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "  top " in ended.stdout
