"""The table of pages: where each is, what it is called, and which module builds it.

A module has `async def build(view: View) -> None`, which puts the page's elements into the frame. A row
whose module is not there is left out, of the navigation too.
"""

import importlib
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.http.hrefs import queue_href as queue_href
from penstock.http.hrefs import reader_href as reader_href
from penstock.model.rights import Right

if TYPE_CHECKING:
    from penstock.dashboard.view import View

Builder = Callable[["View"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Page:
    """One row."""

    path: str  # as Starlette has it, with parameters as {name} or {name:path}
    title: str
    module: str
    in_navigation: bool = True
    right: Right = Right.READ  # needed with the queue of the page, or with some queue
    everywhere: bool = False  # or with every queue

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def is_within(self, other: "Page") -> bool:
        """Whether the navigation shows it as `other`: a queue's page is one of the queues'."""
        within = "/queue/" if other.path == "/" else f"{other.path}/"
        return self == other or self.path.startswith(within)

    def builder(self) -> Builder:
        build: Builder = importlib.import_module(self.module).build
        return build


PAGES: Final = (
    Page("/", "Queues", "penstock.dashboard.overview"),
    Page("/queue/{queue:path}", "Queue", "penstock.dashboard.queue", in_navigation=False),
    Page("/search", "Search", "penstock.dashboard.search"),
    Page("/dead", "Dead letters", "penstock.dashboard.dead"),
    Page("/history", "History", "penstock.dashboard.history", everywhere=True),
    Page("/connections", "Connections", "penstock.dashboard.connections"),
    Page("/connections/{number}", "Connection", "penstock.dashboard.connection", in_navigation=False),
    Page("/readers", "Readers", "penstock.dashboard.readers"),
    Page("/engine", "Engine", "penstock.dashboard.engine"),
    Page("/audit", "Audit", "penstock.dashboard.audit", right=Right.ADMIN),
)
