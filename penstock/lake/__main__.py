"""`python -m penstock.lake`: the process that archives, started and watched by the HTTP API's process.

Its standard input says what to do, a line of JSON, and lasts as long as it is wanted: when that ends, so does
this process, at once and wherever it is. Each line of its standard output is JSON too: `held`, positions that
retention may move on to; `state`, how it stands; `error`, why it does not get on, null when it does again.
"""

import json
import logging
import os
import sys
import threading
import time
from typing import Any, Final

from penstock.common.journal import start_logging
from penstock.errors import PenstockError

LOOK_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
INSTALL: Final = "archiving needs the extra lake: pip install 'penstock[lake]', and restart the broker"

log = logging.getLogger("penstock.lake")


def say(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> int:
    wish = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    start_logging(wish["log_level"], wish["log_format"])
    try:
        import pyarrow as pa

        from penstock.lake.archiver import Archiver, Plan
    except ImportError as error:
        say({"error": f"{INSTALL} ({error})"})
        return 1
    pa.set_cpu_count(1)
    plan = Plan(**{**wish["plan"], "queues": tuple(wish["plan"]["queues"])})
    archiver = Archiver(wish["data"], plan, lambda told: say(told._asdict()))
    pause = LOOK_SECONDS
    while True:
        began = time.monotonic()
        try:
            archiver.turn(began)
        except PenstockError as error:
            say({"error": str(error)})
            log.warning("archiving goes on in %.0f s: %s", pause, error)
            archiver.begin_again()
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
            continue
        if pause > LOOK_SECONDS:
            pause = LOOK_SECONDS
            say({"error": None})
        # Busy for half of the time at most.
        time.sleep(max(LOOK_SECONDS, time.monotonic() - began))


if __name__ == "__main__":
    sys.exit(main())
