"""What takes longer than `make test` may: the tests that it leaves out, and what it tries with few seeds.

    python -m tests.long [--seconds 3600] [--seed N] [--processes N] [KIND ...]

"rest" is what is marked `long`: it comes first, alone and once, and shares processes as `make test` does.
Every other kind of run in `RUNS` is a command that takes a seed. They take turns, as many at once as there
are processes, and each turn has new seeds: the first is printed, so is the command of every turn, and
the command of one that failed repeats it. A turn that hangs is ended, and has failed. The time that is
given is when the last turns begin, counted from the end of "rest".
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from typing import NamedTuple

TURN_SECONDS = 1800.0
REST_SECONDS = 7200.0
"""Much more than any turn takes, and than the tests that are marked `long` do: then it hangs."""
SEEDS = 1000
"""No turn goes through more, from its first on."""
SAID = 6000
"""Of what a turn has said, that much is shown where it failed."""

PYTEST = "PENSTOCK_TEST_SEED={seed} python -m pytest -q -x -p no:cacheprovider "
MODELS = (
    "tests/log/test_model.py tests/model/test_pending.py tests/broker/test_consumers.py "
    "tests/protocols/test_rq_conversation.py"
)
REST = "rest"
RUNS = {
    REST: "python -m pytest -q -p no:cacheprovider --hypothesis-seed={seed} --long -m long --dist loadfile "
    f"--numprocesses {min(os.cpu_count() or 1, 3) + 3} tests",
    "crash": "python -m tests.log.crash {seed} 300",
    "restarts": "python -m tests.broker.restarts {seed} 300",
    "ways": "python tests/protocols/fuzz_ways.py -max_total_time=60 -seed={seed}",
    "walks": "python -m tests.log.walks {seed} 60",
    "disk-full": PYTEST + "tests/log/test_disk_full.py",
    "model": PYTEST + "--hypothesis-seed={seed} " + MODELS,
    "lease": PYTEST + "tests/cluster/test_lease_time.py",
    "kill": PYTEST + "tests/log/test_kill9.py tests/server/test_chaos.py tests/celery/test_crashes.py "
    "tests/http/test_transactions.py",
    "bits": PYTEST + "tests/log/test_damage.py tests/log/test_stage_cuts.py",
    "cut": PYTEST + "tests/client/test_cut.py",
    "streams": PYTEST + "tests/nats/test_stream_log.py tests/nats/test_replica.py "
    "tests/nats/test_stream_contract.py",
    "openapi": PYTEST + "tests/http/test_openapi.py",
    "faults": PYTEST + "tests/cluster/test_faults.py",
    "networks": PYTEST + "tests/cluster/test_partitions.py",
    "spark": "python -m tests.spark.large {seed}",
}
"""The commands, for a seed."""


class Turn(NamedTuple):
    """A command, as it is run and as somebody types it."""

    kind: str
    seed: int

    def typed(self) -> str:
        return RUNS[self.kind].format(seed=self.seed)

    def seconds(self) -> float:
        return REST_SECONDS if self.kind == REST else TURN_SECONDS

    def run(self) -> str:
        """Nothing where it went well, or else what was said."""
        around, command = self.typed().split("python ", 1)
        given = dict(word.split("=", 1) for word in around.split())
        try:
            done = subprocess.run(
                [sys.executable, *command.split()],
                env=os.environ | given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self.seconds(),
                check=False,
            )
        except subprocess.TimeoutExpired as hung:
            return f"{(hung.stdout or b'').decode(errors='replace')[-SAID:]}\nnot done in {self.seconds()} s"
        said = done.stdout.decode(errors="replace")[-SAID:]
        return f"{said}\nexit code {done.returncode}" if done.returncode else ""


def turns(kinds: Sequence[str], first: int, deadline: float) -> Iterator[Turn]:
    for number in count() if kinds else ():
        if time.monotonic() >= deadline and number >= len(kinds):
            return
        yield Turn(kinds[number % len(kinds)], first + number * SEEDS)


def run(
    kinds: Sequence[str], first: int, seconds: float, processes: int, say: Callable[[str], None]
) -> list[Turn]:
    """Each kind at least once, the rest of the tests before all others; which turns have failed."""
    failed: list[Turn] = []
    done: Counter[str] = Counter()
    running: dict[Future[str], Turn] = {}

    def finish(futures: set[Future[str]]) -> None:
        for future in futures:
            turn = running.pop(future)
            done[turn.kind] += 1
            if said := future.result():
                failed.append(turn)
                say(f"FAILED  {turn.typed()}\n{said}")
            else:
                say(f"fine    {turn.typed()}")

    with ThreadPoolExecutor(processes) as pool:
        if REST in kinds:
            turn = Turn(REST, first)
            running[pool.submit(turn.run)] = turn
            finish(wait(running).done)
            kinds = [kind for kind in kinds if kind != REST]
        for turn in turns(kinds, first, time.monotonic() + seconds):
            running[pool.submit(turn.run)] = turn
            if len(running) >= processes:
                finish(wait(running, return_when=FIRST_COMPLETED).done)
        finish(wait(running).done)
    say(f"turns: {', '.join(f'{kind} {number}' for kind, number in sorted(done.items()))}")
    for turn in failed:
        say(f"repeat it:  {turn.typed()}")
    return failed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make test-long", description="Seeded runs, for as long as is given."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(RUNS)}; all of them")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when the last turns begin (3600)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6, 10**9), help="the first one")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="at once (one for each core)"
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.kinds) - RUNS.keys():
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    kinds = given.kinds or list(RUNS)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    say(f"{', '.join(kinds)}: for {given.seconds:g} s, seeds from {given.seed} on (--seed {given.seed})")
    return 1 if run(kinds, given.seed, given.seconds, max(given.processes, 1), say) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
