"""Markup: the pieces of HTML that the page is made of. Texts go in as they are and come out escaped.

`Safe` is a text that is HTML already; everything else is not.
"""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.common import units

ZEROS: Final = frozenset({"0", units.NOTHING, "0 s", "0 %"})


class Safe(str):
    """HTML."""

    __slots__ = ()


class Head(NamedTuple):
    """A column of a table: its heading, and whether there are numbers below it."""

    title: str
    number: bool = True


_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
"""Characters that are not seen, and change how others are."""


def escape(text: str) -> str:
    """A text as HTML. A name of a queue may have anything in it: what is not seen is written out."""
    return html.escape(_UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text))


def text(value: str) -> str:
    """Whatever it is, as HTML."""
    return value if isinstance(value, Safe) else escape(value)


def tag(name: str, content: str, css: str = "") -> Safe:
    attribute = f' class="{css}"' if css else ""
    return Safe(f"<{name}{attribute}>{text(content)}</{name}>")


def link(target: str, label: str) -> Safe:
    return Safe(f'<a href="#{escape(target)}">{text(label)}</a>')


def bad(value: str, is_bad: bool) -> str:
    """A number that is to be seen, where it is bad."""
    return tag("span", value, "bad") if is_bad else value


def table(
    caption: str, heads: Sequence[Head], rows: Iterable[Sequence[str]], foot: Sequence[str] | None = None
) -> Safe:
    """A table that can be moved sideways where it does not fit; the first cell of a row is its heading."""
    top = "".join(f'<th scope="col"{_css(head)}>{text(head.title)}</th>' for head in heads)
    body = "".join(f"<tr>{_row(heads, row)}</tr>" for row in rows)
    bottom = f"<tfoot><tr>{_row(heads, foot)}</tr></tfoot>" if foot is not None else ""
    return Safe(
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody>{bottom}"
        "</table></div>"
    )


def _row(heads: Sequence[Head], row: Sequence[str]) -> str:
    first, *others = zip(heads, row, strict=True)
    cells = [f'<th scope="row">{text(first[1])}</th>']
    cells += [f"<td{_css(head, value)}>{text(value)}</td>" for head, value in others]
    return "".join(cells)


def _css(head: Head, value: str = "") -> str:
    if not head.number:
        return ' class="text"' if value else ""
    return f' class="number{" zero" if value in ZEROS else ""}"'


def definitions(terms: Iterable[tuple[str, str]]) -> Safe:
    return Safe("<dl>" + "".join(f"{tag('dt', term)}{tag('dd', means)}" for term, means in terms) + "</dl>")


def section(anchor: str, title: str, *parts: str) -> Safe:
    body = "".join(map(text, parts))
    return Safe(f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{text(title)}</h2>{body}</section>')


def folded(summary: str, content: str) -> Safe:
    """What is shown when somebody wants it."""
    return Safe(f"<details><summary>{text(summary)}</summary>{text(content)}</details>")
