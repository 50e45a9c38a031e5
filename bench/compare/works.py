"""What is done with each subject: the works of a round, and how large they are.

A work is a mode of the load generator with a size. `publish` leaves a queue that `drain` then takes, so
both come from one row. Quick sizes are for trying things out and for the tests: their figures mean nothing.
"""

from dataclasses import dataclass

RATE_PER_SECOND = 2_000
MESSAGES_LEAST = 300


@dataclass(frozen=True, slots=True)
class Work:
    title: str
    mode: str
    size_bytes: int
    then: str = ""  # after publishing: the title of draining the same


SIZES = {100: "100 B", 1024: "1 KiB", 65_536: "64 KiB", 1 << 20: "1 MiB"}

WORKS: tuple[Work, ...] = (
    *(Work(f"end to end {size}", "end-to-end", size_bytes) for size_bytes, size in SIZES.items()),
    *(Work(f"publish {size}", "publish", size_bytes, f"drain {size}") for size_bytes, size in SIZES.items()),
    Work("32+32 connections", "many", 100),
    Work("one at a time, 32 consumers", "single", 100),
    Work("paced", "paced", 100),
)

TITLES = tuple(title for work in WORKS for title in (work.title, work.then) if title)

# Of the messages of 100 bytes, and at most so many: 64 KiB are three orders more bytes, 1 MiB are four.
SHARE = {100: 1.0, 1024: 0.4, 65_536: 0.02, 1 << 20: 0.02}
MOST = {100: 10_000_000, 1024: 200_000, 65_536: 3_000, 1 << 20: 200}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done."""

    rounds: int
    divide_by: int
    backlog: int
    recoveries: int
    connections: int
    queues: int

    def messages(self, work: Work, of_100_bytes: int) -> int:
        """How many messages a work has, for a subject that takes so many of 100 bytes in about a second."""
        if work.mode == "paced":
            return of_100_bytes // min(self.divide_by, 10)
        share = int(of_100_bytes * SHARE[work.size_bytes] / self.divide_by)
        most = MOST[work.size_bytes]
        return min(max(share, min(MESSAGES_LEAST, most // 10)), most)


FULL = Scale(rounds=3, divide_by=1, backlog=1_000_000, recoveries=3, connections=10_000, queues=10_000)
QUICK = Scale(rounds=1, divide_by=50, backlog=20_000, recoveries=1, connections=200, queues=100)
