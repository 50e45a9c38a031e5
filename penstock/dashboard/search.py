"""Search: messages of all queues, or of some, by condition, state and time."""

from penstock.dashboard.finding import Finder
from penstock.dashboard.layout import style, tag
from penstock.dashboard.view import View


async def build(view: View) -> None:
    style("queue.css")
    tag("h1", "Search")
    Finder(view)
