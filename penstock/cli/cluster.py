"""`penstock cluster up`: a NATS cluster and three front-ends on this machine, to try things out on.

It stays until Ctrl-C (or SIGTERM), and then stops everything in order; a second Ctrl-C ends it at once. With
`--folder` the data is kept and continued the next time; without, it is in a temporary folder that is removed.
A process that ends meanwhile is told, with the last that it said: killing one is what this is for.

`penstock cluster rights` prints what users of NATS must be allowed to do, as a file for its configuration.

Exit codes: 0 stopped, 1 somebody did not start or nobody is left, 2 misuse.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.admin import at_least
from penstock.cli.main import EXIT_FAILURE
from penstock.common import tables, units
from penstock.errors import Misuse
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.rights import rights_of_front_end, rights_of_reader, user_block
from penstock.model.shards import SHARDS_DEFAULT

if TYPE_CHECKING:
    from penstock.cluster.up import LocalCluster

HELP = "start a NATS cluster and front-ends on this machine, to try them out; print rights in NATS"

LOOK_SECONDS: Final = 0.5
NODES: Final = (1, 3, 5)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
QUEUE: Final = "orders"
PORT_BASE_MAX: Final = 65_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("up", "rights"),
        help="up: start it, and stay until Ctrl-C; rights: print the users that NATS needs for a cluster",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="keep the data here and go on from it the next time (default: a temporary folder)",
    )
    parser.add_argument(
        "--nodes", type=int, choices=NODES, default=3, help="NATS nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--front-ends",
        type=at_least(0),
        default=3,
        metavar="N",
        help="brokers that share the logs (default: %(default)s)",
    )
    parser.add_argument(
        "--port-base",
        type=at_least(1),
        metavar="PORT",
        help="front-ends from this port on, ten apart, and nodes from 100 above it (default: free ports)",
    )
    parser.add_argument(
        "--shards",
        type=at_least(1),
        metavar="N",
        help=f"logs that share the queues, of a cluster that is new (default: {SHARDS_DEFAULT})",
    )
    parser.add_argument(
        "--name",
        default=LogNames().log,
        help="rights: [cluster] name of the front-ends (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="for programs: the addresses as one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.action == "rights":
        return _rights(LogNames(args.name), args.shards or SHARDS_DEFAULT)
    from penstock.cluster.up import NODE_PORTS_FROM, PORTS_EACH, LocalCluster

    if args.front_ends > NODE_PORTS_FROM // PORTS_EACH:
        raise Misuse(f"--front-ends {args.front_ends}: use at most {NODE_PORTS_FROM // PORTS_EACH}")
    if args.port_base is not None and args.port_base > PORT_BASE_MAX:
        raise Misuse(f"--port-base {args.port_base}: use at most {PORT_BASE_MAX}")
    folder = Path(args.folder or tempfile.mkdtemp(prefix="penstock-cluster-")).resolve()
    local = LocalCluster(folder, args.nodes, args.front_ends, args.port_base, args.shards)
    try:
        with _ended_by_signals(local.kill) as ending:
            try:
                if not args.json:
                    count = units.counted(args.front_ends, "front-end")
                    print(f"starting {units.counted(args.nodes, 'NATS node')} and {count} …", flush=True)
                local.start()
                _say(local, args)
                code = _stay(local)
            except _Enough:
                code = 0
                print("stopping; Ctrl-C once more ends it at once", file=sys.stderr, flush=True)
            finally:
                ending.begun = True
                local.stop()
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _rights(names: LogNames, shards: int) -> int:
    front, reader = rights_of_front_end(names, shards), rights_of_reader(names, shards)
    print(f"# For {units.counted(shards, 'log')} of cluster {names.log}. Replace the passwords.")
    print("users: [")
    print(user_block("penstock", '"replace-this"', front), end="")
    print("    # Only where Spark reads straight from NATS.")
    print(user_block("spark", '"replace-this-too"', reader), end="")
    print("]")
    return 0


def _stay(local: "LocalCluster") -> int:
    """Until a signal; or until nobody is left."""
    while local.running:
        for it in local.ended():
            print(f"{it.name} {it.how}; the last that it said:", file=sys.stderr)
            for line in it.last_lines:
                print(f"    {line}", file=sys.stderr)
            print(f"    to start it again: {it.command}", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)
    print("penstock cluster: nobody is left", file=sys.stderr)
    return EXIT_FAILURE


# --- what it says ------------------------------------------------------------------------------------------


def _say(local: "LocalCluster", args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(_addresses(local)), flush=True)
        return
    columns = [tables.Column(title) for title in ("", "clients", "monitoring", "log")]
    nodes = [
        (node.name, node.url, f"http://127.0.0.1:{node.ports.monitor}", str(node.folder / "server.log"))
        for node in local.cluster.nodes
    ]
    lines = tables.table(columns, nodes)
    columns = [tables.Column(title) for title in ("user of NATS", "name and password, for credentials")]
    lines += ["", *tables.table(columns, [(user, str(file)) for user, file in local.credentials.items()])]
    if local.front_ends:
        doors = list(local.front_ends[0].addresses)
        titles = [tables.Column(title) for title in ("", *doors)]
        rows = [(it.name, *(it.addresses[door] for door in doors)) for it in local.front_ends]
        lines += ["", *tables.table(titles, rows), "", *_to_try(local)]
    print("\n".join(["", *lines, "", f"data and logs are in {local.folder}; Ctrl-C stops everything"]))
    sys.stdout.flush()


def _addresses(local: "LocalCluster") -> dict[str, Any]:
    return {
        "folder": str(local.folder),
        "engine": ",".join(local.cluster.urls),
        "credentials": {user: str(file) for user, file in local.credentials.items()},
        "nodes": [
            {"name": node.name, "url": node.url, "monitor": f"http://127.0.0.1:{node.ports.monitor}"}
            for node in local.cluster.nodes
        ],
        "front_ends": [{"name": it.name, **it.addresses} for it in local.front_ends],
    }


def _to_try(local: "LocalCluster") -> Iterator[str]:
    first, last = local.front_ends[0].addresses, local.front_ends[-1].addresses
    yield "to try:"
    yield f"  penstock send {QUEUE} hello --url http://{first['http']}"
    yield f"  penstock receive {QUEUE} --url phpmq://{last['phpmq']}"
    yield f"  curl http://{last['http']}/v1/engine"
    yield f"  in a browser: http://{last['http']}/engine"


# --- signals -----------------------------------------------------------------------------------------------


class _Enough(BaseException):
    """A signal said so."""


class _Ending:
    """What a signal does: the first one ends the stay, and once the end has begun, one more hurries it."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry
        self.begun = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.begun:
            self._hurry()
        else:
            self.begun = True
            raise _Enough


@contextmanager
def _ended_by_signals(hurry: Callable[[], None]) -> Iterator[_Ending]:
    ending = _Ending(hurry)
    before = {number: signal.signal(number, ending) for number in ENDING}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
