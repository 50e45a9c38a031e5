"""The tasks of a shop. `celery -A shop worker` runs them."""

import os
import random

from celery import Celery

import penstock.kombu  # from now on, Celery knows penstock:// URLs

app = Celery("shop", broker=os.environ.get("BROKER", "penstock://127.0.0.1:9180"), backend="rpc://")
app.conf.update(
    task_acks_late=True,  # a task that was begun by a worker that died is begun again by another
    task_reject_on_worker_lost=True,  # likewise where a process of its pool died
    worker_prefetch_multiplier=1,  # what waits, waits in the broker: whoever is free gets it
    broker_transport_options={"lease": 30, "retries": 10},
)


class BankIsDown(Exception):
    pass


@app.task(autoretry_for=[BankIsDown], retry_backoff=True, retry_backoff_max=60, max_retries=5)
def pay(order: int, amount: float) -> float:
    """Fails now and then. A next try waits in the broker, longer each time, and keeps nobody busy."""
    if random.random() < 0.2:
        raise BankIsDown(f"order {order}")
    return amount


@app.task
def invoice(amount: float, order: int) -> str:
    return f"order {order}: {amount:.2f} paid"


@app.task
def remind(order: int) -> str:
    return f"order {order}: how did you like it?"
