"""Whether an installed Penstock works: send, receive, `kill -9`, receive. For the Python that runs this.

    python scripts/smoke.py compiled|interpreted

It needs nothing but the package, and looks at none of the sources beside it. What must hold: the build is the
one that was said; what was confirmed before the kill is there after it, what was acknowledged is not. How it
fails: an exception, exit code 1.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Not what lies beside this file: the package as it was installed.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).parent]

COMMAND = (sys.executable, "-P", "-m", "penstock")
SECONDS = 120


def penstock(*words: str) -> str:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def serve(folder: str) -> tuple["subprocess.Popen[Any]", dict[str, str]]:
    from penstock.common.ready import wait_ready

    doors = [word for door in ("sspq", "phpmq", "rq", "http") for word in (f"--{door}", "127.0.0.1:0")]
    broker = subprocess.Popen([*COMMAND, "serve", "--data", folder, *doors], stdout=subprocess.PIPE)
    return broker, dict(wait_ready(broker, SECONDS))


def main(wanted: str) -> None:
    from penstock import __version__
    from penstock.build import is_compiled

    build = "compiled" if is_compiled() else "interpreted"
    assert build == wanted, f"this is {build}"
    with tempfile.TemporaryDirectory() as folder:
        broker, doors = serve(folder)
        try:
            for text in ("one", "two", "three"):
                penstock("send", "orders", text, "--url", f"http://{doors['http']}")
            receive = ("receive", "orders", "--count", "1", "--url")
            assert penstock(*receive, f"phpmq://{doors['phpmq']}") == "one\n"
            broker.kill()
            broker.wait()
            broker, doors = serve(folder)
            assert penstock(*receive, f"phpmq://{doors['phpmq']}") == "two\n"
            assert penstock(*receive, f"phpmq://{doors['phpmq']}") == "three\n"
            broker.terminate()
            assert broker.wait(SECONDS) == 0
        finally:
            broker.kill()
            broker.wait()
        assert " 0 damaged" in (said := penstock("verify", folder)) or "damage" not in said, said
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"penstock {__version__}, {build}, on Python {version}: send, receive, kill -9, receive: fine")


if __name__ == "__main__":
    main(*sys.argv[1:])
