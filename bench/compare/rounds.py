"""The run: every server once, then all of them again, each with an empty folder and alone on the machine.

How it fails: a peer that is not installed, does not start or does not do its work is left out from there
on, with a line in the results that says why. Penstock's failures are ours, and end the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from bench.compare.progress import Progress
from bench.compare.results import Results, Sample
from bench.compare.scenes import SCENES, play
from bench.compare.subjects import PENSTOCK, Setting, Subject
from bench.compare.works import RATE_PER_SECOND, WORKS, Scale, Work
from bench.loadgen import LoadError, drive
from bench.server import PeerFailed, PeerMissing, Server, disk_folder

SECONDS_MAX = 60.0
WARM_UP_SHARE = 10

_runs = count(1)


class Rounds:
    """One run of everything for these settings."""

    def __init__(self, settings: tuple[Setting, ...], scale: Scale) -> None:
        self.results = Results()
        self._settings = settings
        self._scale = scale
        self._failed: set[str] = set()
        self._progress = Progress(self._seconds_expected())

    def run(self) -> Results:
        for number in range(1, self._scale.rounds + 1):
            for setting in self._settings:
                self._progress.step(
                    f"round {number} of {self._scale.rounds} · {setting.command}", setting.start_seconds
                )
                self._round(setting)
        for setting in self._settings:
            for subject in setting.subjects:
                for scene in subject.scenes:
                    self._progress.step(f"{subject.name} · {scene}", SCENES[scene].seconds)
                    with self._forgiven(setting, subject):
                        found = play(scene, setting, subject, self._scale)
                        self.results.scenes |= {(subject.name, name): value for name, value in found.items()}
        return self.results

    def _round(self, setting: Setting) -> None:
        try:
            with disk_folder() as folder, setting.start(folder) as server:
                for subject in setting.subjects:
                    with self._forgiven(setting, subject):
                        self._warm_up(server, subject)
                for work in WORKS:
                    for subject in setting.subjects:
                        if work.mode in subject.messages:
                            self._progress.step(f"    {subject.name} · {work.title}", self._seconds(work))
                            with self._forgiven(setting, subject):
                                self._work(server, subject, work)
        except (PeerMissing, PeerFailed) as error:
            if setting.program == PENSTOCK:
                raise
            self._leave_out(setting.program, str(error))

    def _warm_up(self, server: Server, subject: Subject) -> None:
        messages = max(subject.messages.get("end-to-end", 0) // self._scale.divide_by // WARM_UP_SHARE, 100)
        run = next(_runs)
        self._drive(server, subject, "end-to-end", queue_of(subject.wire, run), messages, run, 100)

    def _work(self, server: Server, subject: Subject, work: Work) -> None:
        run = next(_runs)
        queue = queue_of(subject.wire, run)
        messages = self._scale.messages(work, subject.messages[work.mode])
        size = work.size_bytes
        first = self._drive(server, subject, work.mode, queue, messages, run, size, work.title)
        self.results.samples.append(first)
        if not work.then:
            return
        if subject.drained_by:
            port = server.ports[subject.drained_by]
            drive(subject.drained_by, "drain", port, queue=queue, messages=messages, run=run, size_bytes=size)
        else:
            drained = self._drive(server, subject, "drain", queue, messages, run, size, work.then)
            self.results.samples.append(drained)

    @staticmethod
    def _drive(
        server: Server,
        subject: Subject,
        mode: str,
        queue: str,
        messages: int,
        run: int,
        size_bytes: int,
        title: str = "",
    ) -> Sample:
        before = server.cpu_seconds()
        load = drive(
            subject.wire,
            mode,
            server.ports[subject.wire],
            queue=queue,
            messages=messages,
            run=run,
            size_bytes=size_bytes,
            rate_per_second=RATE_PER_SECOND,
            seconds_max=SECONDS_MAX,
        )
        return Sample(subject.name, title, load, server.quiet_cpu_seconds() - before)

    @contextmanager
    def _forgiven(self, setting: Setting, subject: Subject) -> Iterator[None]:
        """What a peer cannot do is left out; Penstock is to do everything."""
        try:
            yield
        except (LoadError, PeerMissing, PeerFailed) as error:
            if setting.program == PENSTOCK:
                raise
            self._leave_out(subject.name, str(error))

    def _leave_out(self, who: str, why: str) -> None:
        line = f"{who}: {why}"
        if line not in self._failed:
            self._failed.add(line)
            self.results.left_out.append(line)
            self._progress.step(f"left out: {line}", 0)

    def _seconds_expected(self) -> float:
        rounds = sum(
            setting.start_seconds
            + sum(
                self._seconds(work)
                for work in WORKS
                for subject in setting.subjects
                if work.mode in subject.messages
            )
            for setting in self._settings
        )
        scenes = sum(
            SCENES[scene].seconds
            for setting in self._settings
            for subject in setting.subjects
            for scene in subject.scenes
        )
        return rounds * self._scale.rounds + scenes

    @staticmethod
    def _seconds(work: Work) -> float:
        return 2.5 if work.then or work.mode == "paced" else 1.5


def queue_of(wire: str, run: int) -> str:
    """A new one each time; SSPQ has no names and always uses the listener's."""
    return "default" if wire == "sspq" else f"bench-{run}"
