"""Penstock and Spark: queues as batches and streams, `spark.readStream.format("penstock")`.

Needs the extra `spark`; `history` and `archived`, which read the Delta tables of `[archive]`, need `lake`
too. Nothing else in the package imports this one.
"""

from typing import Any

from penstock.spark.archive import INSTALL
from penstock.spark.source import PenstockDataSource

__all__ = ["PenstockDataSource", "archived", "archived_end", "history"]


def __getattr__(name: str) -> Any:
    """Only who asks for them needs deltalake."""
    if name in ("archived", "archived_end", "history"):
        try:
            from penstock.spark import lake
        except ImportError as error:
            raise ImportError(f"penstock.spark.{name} needs the extra lake: {INSTALL} ({error})") from None
        return getattr(lake, name)
    raise AttributeError(name)
