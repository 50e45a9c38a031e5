"""Two versions side by side in a cluster: what docs/upgrading.md promises."""

import sys
from pathlib import Path

from penstock import __version__
from penstock.cluster.frames import VERSION, Hello, Reader, decode_hello
from penstock.cluster.records import Claim, Seen, claim_of
from tests.cluster.processes import FrontEnd, site
from tests.http.api import Api
from tests.server.harness import until

HELLO_OF_0_1_0 = bytes.fromhex(
    "8000000001000000000000007b226d61676963223a2270656e73746f636b2d72656c6179222c2276657273696f"
    "6e223a332c226b696e64223a22776f726473222c2266726f6e745f656e64223a2266726f6e742d312d61623132"
    "222c227465726d223a372c226c696665223a223566222c226e6f6e6365223a2230306666222c2263616c6c6572"
    "223a22227d"
)
"""How a follower of version 0.1.0 begins a link: one for words, of front-end `front-1-ab12`, in term 7."""

LEASE_OF_0_1_0 = b'{"leader":"front-1-ab12","term":7,"relay":"10.0.0.1:7400","version":"0.1.0"}'
LATER = "9.9.9"


class Later(FrontEnd):
    """One that says that it is of a later version, with that number of the relay."""

    relay = VERSION
    version = LATER

    def command(self) -> list[str]:
        program = (
            f"import sys, penstock; penstock.__version__ = {self.version!r}; "
            f"import penstock.cluster.frames as frames; frames.VERSION = {self.relay}; "
            f"from penstock.cli.main import main; sys.exit(main())"
        )
        return [sys.executable, "-c", program, *super().command()[3:]]


class Other(Later):
    """One whose relay has another number."""

    relay = VERSION + 1
    version = "10.0.0"


def versions(front: FrontEnd) -> dict[str, str]:
    members = front.ask("/v1/engine")["cluster"]["members"]
    return {it["id"].rpartition("-")[0]: it["version"] for it in members if it["linked"]}


def send(front: FrontEnd, text: bytes) -> None:
    with Api(front.ports["http"]) as api:
        assert api.send("orders", text)


def test_what_0_1_0_says_is_understood() -> None:
    """As long as the relay has its number; and the lease in any case."""
    assert VERSION == 3, "another number: record the hello of the last version with this one, and keep both"
    (frame,) = Reader().feed(HELLO_OF_0_1_0)
    assert decode_hello(frame) == Hello("words", "front-1-ab12", 7, "5f", "00ff", "")
    assert claim_of(Seen("lease", 1, LEASE_OF_0_1_0)) == Claim("front-1-ab12", 7, "10.0.0.1:7400", "0.1.0")


def test_a_rolling_upgrade(tmp_path: Path) -> None:
    """A later version with the same relay serves beside this one, and goes on alone; one with another relay
    waits, with its clients, until it leads. Nothing that was confirmed is lost on the way."""
    with site(tmp_path, nodes=1, fronts=1) as running:
        (a,) = running.fronts
        url = running.nodes.urls
        send(a, b"at a")
        b = Later("b", tmp_path / "b", running.nodes, url)
        running.fronts.append(b)
        b.start()
        until(lambda: versions(a) == {"a": __version__, "b": LATER}, "both to be linked")
        send(b, b"at b")
        a.stop()
        until(lambda: versions(b) == {"b": LATER}, "the later one to lead")
        send(b, b"at b alone")
        c = Other("c", tmp_path / "c", running.nodes, url)
        running.fronts.append(c)
        c._spawn()  # It is ready when it leads, or has waited for long enough.
        c.says(f"no link to the leader (of version {LATER}, this is 10.0.0)")
        b.says("a peer of version 4, this is 3: run one Penstock everywhere")
        send(b, b"at b beside c")
        assert "c" not in versions(b)
        b.stop()
        until(lambda: versions(c) == {"c": "10.0.0"}, "the other one to lead")
        send(c, b"at c")
        url_of_c = f"http://127.0.0.1:{c.ports['http']}"
        found = c.penstock("peek", "orders", "--raw", "--url", url_of_c)
        assert found == "at aat bat b aloneat b beside cat c"
