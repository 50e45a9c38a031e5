"""`penstock connections`: the list, one connection, and ending one, on a real broker."""

import pytest

from penstock.cli.connections import goes_back
from penstock.cli.main import main
from tests.cli.conftest import Run, objects
from tests.cli.terminal import Terminal
from tests.http.api import Api
from tests.http.test_connections import row_of
from tests.server.harness import BrokerProcess, Wire, phpmq, until


def consumer(broker: BrokerProcess, api: Api, queue: str, count: int) -> tuple[Wire, int]:
    """One that holds so many messages; its number."""
    wire = Wire(("127.0.0.1", broker.ports["phpmq"]))
    api.send(queue, *[b"x"] * count)
    wire.say(phpmq(2, (1, queue.encode()), (4, b"10")))
    until(lambda: row_of(api, wire.socket)["held"] == count, "it to hold them")
    return wire, row_of(api, wire.socket)["number"]


def test_list_and_one(broker: BrokerProcess, api: Api, run: Run) -> None:
    wire, number = consumer(broker, api, "shown", 2)
    with wire:
        wire.say(phpmq(1, (1, b"sent.to"), (2, b"x")))
        until(lambda: row_of(api, wire.socket)["sent"] == 1, "it to send")
        heading, *rows = run("connections")
        assert heading.split() == [
            *("NUMBER", "CLIENT", "PROTOCOL", "USER", "TAKES", "SENDS", "IN/S", "OUT/S", "HELD", "SAID")
        ]
        (mine,) = [it.split() for it in rows if it.split()[0] == str(number)]
        assert mine[2:6] == ["phpmq", "-", "shown", "sent.to"]
        assert mine[8] == "2"
        (told,) = objects(run("connections", str(number), "--json"))
        assert told.keys() == api.get(f"/v1/connections/{number}").keys()
        assert told["sent_rate"] == 0, "both looks were taken"
        shown = "\n".join(run("connections", str(number)))
        assert f"number      {number}" in shown
        assert "protocol    phpmq, at 127.0.0.1:" in shown
        (taken,) = [line.split() for line in shown.splitlines() if line.startswith("shown ")]
        assert (taken[1:3], taken[-4:]) == (["10", "2"], ["2", "0", "0", "0"])
        assert any(line.split()[:2] == ["sent.to", "1"] for line in shown.splitlines())


def test_end(broker: BrokerProcess, api: Api, run: Run, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    wire, number = consumer(broker, api, "ended", 2)
    with wire:
        assert main(["connections", "--end", str(number), "--url", url]) == 2
        assert "say --yes to end without a question" in capsys.readouterr().err
        for wrong in (["--yes"], ["3", "--end", "3", "--yes"]):
            assert main(["connections", *wrong, "--url", url]) == 2
        capsys.readouterr()
        (line,) = run("connections", "--end", str(number), "--yes")
        assert line.startswith("ended phpmq:127.0.0.1:")
        assert line.endswith(", which held 2 messages")
    assert api.get("/v1/queues/ended")["ready"] == 2
    for arguments in ([str(number)], ["--end", str(number), "--yes"]):
        assert main(["connections", *arguments, "--url", url]) == 1
        assert f"there is no connection {number} (any more)" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1)])
def test_end_asks_on_a_terminal(broker: BrokerProcess, api: Api, url: str, answer: str, code: int) -> None:
    wire, number = consumer(broker, api, f"asked.{code}", 1)
    with wire, Terminal("connections", "--end", str(number), "--url", url, columns=250) as terminal:
        terminal.wait_for("1 message that it holds will go back, which is a delivery that has failed. [y/N] ")
        terminal.type(answer)
        assert terminal.end() == code
        assert ("nothing was ended" if code else "ended phpmq:") in terminal.seen
        assert api.ask("GET", f"/v1/connections/{number}").status == (200 if code else 404)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (0, "It holds nothing."),
        (1, "1 message that it holds will go back, which is a delivery that has failed."),
        (2, "2 messages that it holds will go back, which is each a delivery that has failed."),
        (None, "What it holds goes back, and is a delivery that has failed."),
    ],
)
def test_what_goes_back_is_said(held: int | None, said: str) -> None:
    assert goes_back({"held": held}) == said
