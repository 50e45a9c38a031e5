"""New seeds for the one property of the wires (`ways.py`).

    python tests/protocols/fuzz_ways.py -max_total_time=600 [-seed=N]

Not guided by coverage, so it runs on the compiled build as well (in build/compiled). The options are those of
the other fuzzers, and others are ignored. It begins where no run has begun before, or at -seed, and ends with
the seed that breaks the property.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from penstock.build import COMPILED
from tests.protocols.ways import search


def main() -> None:
    options = dict(
        argument[1:].split("=", 1)
        for argument in sys.argv[1:]
        if argument.startswith("-") and "=" in argument
    )
    first = int(options.get("seed", time.time_ns() // 1000))
    say = sys.stderr.write
    say(f"{'compiled' if COMPILED else 'interpreted'}, seeds from {first} on\n")
    count = search(float(options.get("max_total_time", 600)), first)
    say(f"Done {count} runs: every stream says the same in every way\n")


if __name__ == "__main__":
    main()
