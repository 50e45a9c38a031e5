"""Addresses of the dashboard's pages, for whoever points at one."""

from urllib.parse import quote, urlencode


def queue_href(queue: str, **query: object) -> str:
    """The address of a queue's page, or of a part of it. A value of None is left out of the query."""
    words = {name: value for name, value in query.items() if value is not None}
    path = f"/queue/{quote(queue, safe='')}"
    # A browser takes "." and ".." out of a path, however they are written.
    if queue in (".", ".."):
        path, words = "/queue/", {"name": queue, **words}
    return f"{path}?{urlencode(words)}" if words else path


def reader_href(name: str) -> str:
    """The page of readers, with one of them below."""
    return f"/readers?{urlencode({'reader': name})}#reader"
