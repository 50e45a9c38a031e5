"""Who is compared: servers in a setting, and the wires over which each one is measured.

A setting is one server process with its flags; it is started once for each round and serves all its
subjects. How many messages a run has is chosen so that it takes about a second there, and has no other
meaning. Penstock is there in two builds, `VARIANTS`: the sources of this tree, and its compiled modules where
`scripts/bench` could make them and says by `BENCH_COMPILED` in which folder they are.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import peers
from bench.server import Server


@dataclass(frozen=True, slots=True)
class Subject:
    """A wire of a server."""

    name: str
    wire: str
    is_durable: bool  # what was confirmed, and nobody has acknowledged, outlives a power cut
    confirmed: str  # what it means
    messages: Mapping[str, int]  # by mode, of 100 bytes; a mode that is not here is not measured
    scenes: tuple[str, ...] = ()
    drained_by: str = ""  # another wire that takes away what was published, which is not measured then


@dataclass(frozen=True, slots=True)
class Setting:
    """A server as it is started."""

    program: str
    command: str  # as a reader of the report would type it
    start: Callable[[Path], Server]
    subjects: tuple[Subject, ...]
    start_seconds: float = 1.0  # about; for the time that is left


@dataclass(frozen=True, slots=True)
class Variant:
    """A way in which Penstock was built, and how it is run."""

    name: str
    command: tuple[str, ...] = (sys.executable, "-m", "penstock")
    environment: Mapping[str, str] = field(default_factory=dict)


def variants(compiled_folder: str | None) -> tuple[Variant, ...]:
    """Both builds, or only the sources where there is no other."""
    interpreted = Variant("interpreted")
    if compiled_folder is None:
        return (interpreted,)
    # The folder in which it is started has the sources, and is not looked into.
    environment = {"PYTHONPATH": compiled_folder, "PYTHONSAFEPATH": "1"}
    return interpreted, Variant("compiled", environment=environment)


VARIANTS = variants(os.environ.get("BENCH_COMPILED"))

ALL_SCENES = ("backlog", "idle", "queues")
PENSTOCK = "Penstock"


def counts(end_to_end: int, publish: int, many: int) -> dict[str, int]:
    return {"end-to-end": end_to_end, "publish": publish, "many": many, "paced": 4_000}


def penstock_setting(variant: Variant) -> Setting:
    """Penstock with its defaults: durability `commit`, all listeners, the second process for HTTP. But one
    connection makes all the queues, as fast as it can."""

    def named(wire: str) -> str:
        return f"{PENSTOCK} {wire}, {variant.name}"

    return Setting(
        PENSTOCK,
        "penstock serve (durability commit)",
        partial(
            peers.penstock,
            http=True,
            command=variant.command,
            environment=variant.environment,
            more=peers.AS_MANY_QUEUES,
        ),
        (
            Subject(
                named("PHPMQ"),
                "phpmq",
                True,
                "the wire has no confirmation. The clock stops when all have arrived; for publish, when a "
                "question behind the last message is answered: all are taken in, synced in the next group",
                counts(500_000, 1_500_000, 200_000),
                ALL_SCENES,
            ),
            Subject(
                named("RQ"),
                "rq",
                True,
                "DELIVERED for a NOREPLY request: the message is synced",
                counts(400_000, 400_000, 150_000),
            ),
            # A consumer has one message at a time there, which is another measure.
            Subject(
                named("SSPQ"),
                "sspq",
                True,
                "as PHPMQ",
                {"publish": 1_500_000, "single": 50_000},
                drained_by="phpmq",
            ),
        ),
    )


def redis_setting(appendfsync: str, is_durable: bool, meaning: str) -> Setting:
    shown = f"Redis {{}}, fsync {appendfsync}"
    return Setting(
        "Redis",
        f"redis-server --appendonly yes --appendfsync {appendfsync}",
        partial(peers.redis, appendfsync=appendfsync),
        (
            Subject(
                shown.format("lists"),
                "redis-lists",
                is_durable,
                f"LPUSH is answered: {meaning}",
                counts(150_000, 300_000, 80_000),
                # What is kept in memory does not depend on when the file is synced.
                ALL_SCENES if is_durable else (),
            ),
            Subject(
                shown.format("Streams"),
                "redis-streams",
                is_durable,
                f"XADD is answered: {meaning}",
                counts(150_000, 250_000, 80_000),
                ("backlog", "queues") if is_durable else (),
            ),
        ),
    )


def nats_setting(sync_interval: str, is_durable: bool, meaning: str, messages: Mapping[str, int]) -> Setting:
    return Setting(
        "NATS",
        f"nats-server with jetstream {{ sync_interval: {sync_interval} }}, one node",
        partial(peers.nats, sync_interval=sync_interval),
        (
            Subject(
                f"NATS JetStream, sync {sync_interval}",
                "nats",
                is_durable,
                f"the publish is answered: {meaning}",
                messages,
                () if is_durable else ALL_SCENES,
            ),
        ),
    )


def beanstalkd_setting(fsync: bool, meaning: str, messages: Mapping[str, int]) -> Setting:
    return Setting(
        "beanstalkd",
        f"beanstalkd -b DIR {'-f 0' if fsync else '-F'}",
        partial(peers.beanstalkd, fsync=fsync),
        (
            Subject(
                f"beanstalkd, {'fsync each' if fsync else 'no fsync'}",
                "beanstalkd",
                fsync,
                f"INSERTED: {meaning}",
                {**messages, "single": messages["end-to-end"]},
                () if fsync else ALL_SCENES,
            ),
        ),
    )


RABBITMQ = Setting(
    "RabbitMQ",
    "rabbitmq-server, one node",
    peers.rabbitmq,
    (
        Subject(
            "RabbitMQ quorum queue",
            "amqp-quorum",
            True,
            "basic.ack of a publisher confirm: the message is in the synced log of the queue",
            counts(15_000, 25_000, 15_000),
        ),
        Subject(
            "RabbitMQ classic queue, persistent",
            "amqp",
            True,
            "basic.ack of a publisher confirm: the message is on the disk, or a consumer had acknowledged it",
            counts(25_000, 25_000, 15_000),
            ALL_SCENES,
        ),
        Subject(
            "RabbitMQ classic queue, transient",
            "amqp-transient",
            False,
            "basic.ack of a publisher confirm: the queue has it in memory",
            counts(30_000, 40_000, 20_000),
        ),
    ),
    start_seconds=8.0,
)

SETTINGS: tuple[Setting, ...] = (
    *map(penstock_setting, VARIANTS),
    redis_setting("always", True, "the message is synced"),
    redis_setting("everysec", False, "a power cut takes up to about two seconds"),
    nats_setting("always", True, "the message is synced", counts(3_000, 5_000, 8_000)),
    nats_setting("2m", False, "a power cut takes up to two minutes", counts(80_000, 200_000, 50_000)),
    beanstalkd_setting(True, "the message is synced", counts(4_000, 6_000, 4_000)),
    beanstalkd_setting(False, "a power cut may take it", counts(25_000, 60_000, 25_000)),
    RABBITMQ,
)


def chosen(words: list[str]) -> tuple[Setting, ...]:
    """The settings with those subjects whose name has one of the words; all where there are no words."""
    if not words:
        return SETTINGS
    found = []
    for setting in SETTINGS:
        subjects = tuple(
            subject
            for subject in setting.subjects
            if any(word.lower() in subject.name.lower() for word in words)
        )
        if subjects:
            found.append(
                Setting(setting.program, setting.command, setting.start, subjects, setting.start_seconds)
            )
    return tuple(found)
