# mypy: disable-error-code="untyped-decorator"
"""The tasks that the workers of these tests run. `celery -A tests.celery.tasks worker`"""

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Reject

import penstock.kombu  # noqa: F401 - which is all that it takes

app = Celery("tests", broker=os.environ.get("BROKER", "penstock://"))
app.conf.update(json.loads(os.environ.get("CELERY_SETTINGS", "{}")))


def write(path: str, line: str) -> None:
    """One line, whole, beside those of other processes."""
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(number, f"{line}\n".encode())
    os.close(number)


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(acks_late=True)
def note(path: str, line: object) -> None:
    write(path, str(line))


@app.task(acks_late=True)
def wait_for(path: str, released: str) -> None:
    """Says that it has begun, and ends when there is a file."""
    write(path, f"begun {os.getpid()}")
    while not Path(released).exists():
        time.sleep(0.02)
    write(path, "ended")


@app.task
def wait_for_early(path: str, released: str) -> None:
    wait_for(path, released)


@app.task(bind=True, max_retries=2)
def third_time_lucky(self: Any, path: str) -> int:
    write(path, repr(time.time()))
    if self.request.retries < 2:
        raise self.retry(countdown=0.3)
    return int(self.request.retries)


@app.task(acks_late=True)
def refuse(requeue: bool = False) -> None:
    raise Reject("not that one", requeue=requeue)


@app.task(bind=True)
def delivery(self: Any) -> dict[str, Any]:
    return dict(self.request.delivery_info)
