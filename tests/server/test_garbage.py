"""What a long look for cycles has found alive is set aside, and taken back after a while."""

import subprocess
import sys

from tests.server.harness import ROOT

PROGRAM = """
import gc, weakref
from penstock.server import garbage

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return node

garbage.LONG_SECONDS = -1.0
subject = garbage.Garbage()
subject.start()
gc.disable()
many = [Node() for _ in range(100_000)]
node = cycle()
gone = weakref.ref(node)
gc.collect()
print(gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 1000)
del node
gc.collect()
print(gone() is not None)
garbage.TAKE_BACK_SECONDS = -1.0
gc.collect()
garbage.TAKE_BACK_SECONDS = 3600.0
print(gc.get_freeze_count())
gc.collect()
print(gone() is None, gc.get_freeze_count() > 100_000)
subject.stop()
print(gc.callbacks)
"""


def test_what_was_found_alive_is_looked_at_again_when_an_hour_is_over() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "True", "0", "True", "True", "[]"]
