"""Problems: how the API says no. One table of names, one exception, one form (RFC 9457).

A problem has a name that programs can rely on (`type` is `urn:penstock:NAME`), a status, and a
`detail` for people: who, what, and what to do now.
"""

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse

from penstock.errors import PenstockError
from penstock.http.link import CallRefused
from penstock.log.errors import LogRefused, QueueDeleted

MEDIA: Final = "application/problem+json"
_URN: Final = "urn:penstock:"

PROBLEMS: Final[Mapping[str, tuple[int, str]]] = {
    "bad-request": (400, "The request cannot be understood"),
    "unauthorized": (401, "A token is needed"),
    "forbidden": (403, "Not allowed"),
    "not-found": (404, "There is nothing at this address"),
    "queue-not-found": (404, "There is no such queue"),
    "message-not-found": (404, "There is no such message"),
    "reader-not-found": (404, "There is no such reader"),
    "file-not-found": (404, "There is no such file"),
    "connection-not-found": (404, "There is no such connection"),
    "stage-not-found": (404, "There is no such stage"),
    "transaction-not-found": (404, "There is no such transaction"),
    "method-not-allowed": (405, "This address does not take that method"),
    "request-timeout": (408, "The rest of the request did not come"),
    "conflict": (409, "It does not go together with what is already there"),
    "key-reused": (409, "The key was used for something else"),
    "queue-deleted": (409, "The queue was deleted, and another one has its name"),
    "offsets-missing": (410, "Retention has removed it"),
    "body-too-large": (413, "The body is too large"),
    "unsupported-media-type": (415, "The body is of a kind that is not taken here"),
    "too-many-guesses": (429, "Too many wrong tokens"),
    "queue-full": (429, "The queue is full"),
    "too-many-searches": (429, "Too many searches at once"),
    "head-too-large": (431, "The head of the request is too large"),
    "internal": (500, "A fault of the broker's"),
    "not-installed": (501, "Something is not installed"),
    "no-leader": (503, "Nobody leads what this is about at this moment"),
    "unavailable": (503, "The broker cannot do that now"),
    "disk-full": (507, "The disk is full"),
}
"""Every problem: its name, status and title."""

_OF_REFUSALS: Final[Mapping[str, str]] = {
    "refused": "conflict",
    "no-queue": "queue-not-found",
    "deleted": "queue-deleted",
    "no-reader": "reader-not-found",
    "no-connection": "connection-not-found",
    "attempt-over": "unavailable",
    "no-stage": "stage-not-found",
    "stage-damaged": "conflict",
    "name": "bad-request",
    "disk-full": "disk-full",
    "queue-full": "queue-full",
    "too-large": "body-too-large",
    "failed": "unavailable",
    "draining": "unavailable",
    "too-fast": "unavailable",
    "unavailable": "unavailable",
    "bug": "internal",
}
"""What the first process's kinds of no are here."""


class Problem(PenstockError):
    """An answer that says no. `more` are fields beside the usual ones; `headers` go with it."""

    def __init__(
        self, name: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
    ) -> None:
        super().__init__(detail)
        self.name = name
        self.detail = detail
        self.headers = dict(headers or {})
        self.more = more

    @property
    def status(self) -> int:
        return PROBLEMS[self.name][0]

    def fields(self) -> dict[str, Any]:
        status, title = PROBLEMS[self.name]
        return {
            "type": _URN + self.name,
            "title": title,
            "status": status,
            "detail": self.detail,
            **self.more,
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.fields(), self.status, self.headers, media_type=MEDIA)


def problem_of(error: PenstockError) -> Problem | None:
    """What an error of the layers below is to a caller; None where it is a fault of ours."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, CallRefused):
        name = _OF_REFUSALS.get(error.kind, "internal")
        headers = {"Retry-After": "1"} if name in ("queue-full", "unavailable", "disk-full") else None
        return Problem(name, str(error), headers=headers)
    if isinstance(error, LogRefused):
        return Problem("queue-deleted" if isinstance(error, QueueDeleted) else "conflict", str(error))
    return None
