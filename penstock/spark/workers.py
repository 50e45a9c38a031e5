"""Workers: what Penstock does for the Python workers of Spark that run its tasks.

Spark's daemon forks them, keeps them for the next task, and after each has Python look for garbage in all
that there is: every module that was ever imported, a hundred thousand objects. Of a task that reads a million
rows from files, that was a third of what its worker took. So what a worker has when its first task of ours
ends is set aside: modules stay anyway.
"""

import gc
import sys
from typing import Final

DAEMON: Final = "pyspark.daemon"

_is_settled = False


def settle_in() -> None:
    """At the end of a task: what is there now is not looked at again. Once, and only in such a worker."""
    global _is_settled
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if not _is_settled and spec is not None and spec.name == DAEMON:
        _is_settled = True
        gc.collect()
        gc.freeze()
