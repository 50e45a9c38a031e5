"""What was measured: samples of works, findings of scenes, and who failed at what.

A figure is the median of a subject's samples of a work. There is none where nothing was measured, and
whoever asks for a ratio with it gets none either.
"""

from dataclasses import dataclass, field
from statistics import median

from bench.loadgen import Load


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    subject: str
    work: str
    load: Load
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """The medians of a subject's samples of a work; microseconds of CPU are those of one message."""

    per_second: float
    cpu_us: float
    p50_us: float | None = None
    p99_us: float | None = None
    p999_us: float | None = None
    delay_p99_us: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What Penstock's processes did for a message; None where it could not be counted."""

    subject: str
    work: str
    system_calls: float | None
    most_frequent: str
    allocations: float | None


@dataclass
class Results:
    samples: list[Sample] = field(default_factory=list)
    scenes: dict[tuple[str, str], float] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def figure(self, subject: str, work: str) -> Figure | None:
        found = [one for one in self.samples if (one.subject, one.work) == (subject, work)]
        if not found:
            return None
        latencies = [one.load.latency for one in found if one.load.latency is not None]
        delays = [one.load.send_delay for one in found if one.load.send_delay is not None]
        return Figure(
            median(one.load.per_second for one in found),
            median(one.cpu_seconds / one.load.messages for one in found) * 1e6,
            median(spread.p50 for spread in latencies) if latencies else None,
            median(spread.p99 for spread in latencies) if latencies else None,
            median(spread.p999 for spread in latencies) if latencies else None,
            median(spread.p99 for spread in delays) if delays else None,
        )
