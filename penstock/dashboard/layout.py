"""Layout: the frame that all pages share, and the blocks that they are built of.

    header   name, navigation, the broker's state, light or dark, sign-out
    banner   that the broker is not ready; of a lost link, the browser itself tells (`assets/page.js`)
    bar      how much needs attention, and what first; the first page says all of it
    main     the page

Text is always set as text: nothing here, and nothing in a page, makes HTML of data.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from penstock.control.frames import Fields
from penstock.dashboard.feed import Attention, Tick
from penstock.dashboard.pages import PAGES
from penstock.dashboard.view import View
from penstock.model.rights import Right


def tag(name: str, text: str = "", classes: str = "", **attributes: str) -> TextElement:
    """An HTML element with text. `aria_label="…"` becomes the attribute `aria-label`."""
    element = TextElement(tag=name, text=text)
    if classes:
        element.classes(classes)
    for key, value in attributes.items():
        element.props[key.rstrip("_").replace("_", "-")] = value
    return element


@contextlib.contextmanager
def frame(view: View) -> Iterator[None]:
    """Put what is made within it between the header and the end of the page."""
    client = view.client
    with client.layout:
        _header(view).move(target_index=0)
        _banner(view).move(target_index=1)
        _attention(view).move(target_index=2)
        tag("a", "Skip to the content", "ps-skip", href="#main").move(target_index=0)
    client.content.classes("ps-content").props["id"] = "main"
    client.content.props["tabindex"] = "-1"
    with client.content:
        yield


def _header(view: View) -> ui.element:
    header = tag("header", classes="ps-header")
    with header:
        with tag("a", classes="ps-brand", href="/", aria_label="Penstock, queues"):
            tag("img", src="/_penstock/favicon.svg", alt="", width="22", height="22")
            tag("span", "Penstock")
        with tag("nav", classes="ps-nav", aria_label="Pages"):
            for page in PAGES:
                if page.in_navigation and page.is_there and view.may_open(page):
                    link = tag("a", page.title, href=page.path)
                    if view.page.is_within(page):
                        link.props["aria-current"] = "page"
        tag("span", classes="ps-grow")
        _state(view)
        user = view.session.user
        if user is not None and user.name:
            tag("span", user.name, "ps-who", title=f"may: {user.words}")
            with tag("form", method="post", action="/sign-out"):
                tag("button", "Sign out", "ps-button ps-quiet", type="submit")
        tag("button", "Auto", "ps-button ps-quiet ps-theme", type="button", data_ps_theme="")
    return header


def _banner(view: View) -> ui.element:
    banner = tag("div", "", "ps-banner", role="alert")
    banner.set_visibility(False)
    shown = ""

    def tick(tick: Tick) -> None:
        nonlocal shown
        said = [] if tick.health.ready else [f"The broker is not ready: {tick.health.reason}."]
        text = " ".join([*said, *left_out(tick.attention.missing)])
        if text != shown:
            shown = text
            banner.set_text(text)
            banner.set_visibility(bool(text))

    view.on_tick(tick)
    return banner


def left_out(missing: Sequence[str]) -> Iterator[str]:
    """Where a list is not whole, and a queue that is not there may be there all the same."""
    if missing:
        who = ", ".join(f"front-end {it}" if not it.startswith("shard ") else it for it in missing)
        yield f"What is shown may be incomplete or old: no answer from {who}."


def _attention(view: View) -> ui.element:
    """A line on every page but the first, which has them all at its head."""
    with tag("div", classes="ps-attention", role="status") as bar:
        link = tag("a", "", href="/#attention")
    bar.set_visibility(False)
    shown = ("", "")

    def tick(tick: Tick) -> None:
        nonlocal shown
        said = _first_of(tick.attention)
        if said == shown or view.page.path == "/":
            return
        shown = said
        text, level = said
        link.set_text(text)
        bar.classes(**{"add" if level == "bad" else "remove": "ps-bad"})
        bar.set_visibility(bool(text))

    view.on_tick(tick)
    return bar


def _first_of(attention: Attention) -> tuple[str, str]:
    """What is most urgent, in a line, and its level."""
    if not attention.findings:
        return "", ""
    first = attention.findings[0]
    more = f", and {attention.count - 1:,} more" if attention.count > 1 else ""
    return f"Needs attention: {headline(first)}{more}", first["level"]


def headline(finding: Fields) -> str:
    """`orders: Nothing is settled`; of the broker itself without a name."""
    subject = finding["queue"] or finding["reader"]
    return f"{subject}: {finding['title']}" if subject else str(finding["title"])


def _state(view: View) -> None:
    """One word about the broker. That the link to it is lost, the browser sees by itself."""
    state = tag("span", "Connecting", "ps-state", role="status")
    shown: bool | None = None

    def tick(tick: Tick) -> None:
        nonlocal shown
        if tick.health.ready != shown:
            shown = tick.health.ready
            state.set_text("Ready" if shown else "Not ready")
            words = ("ps-state-ok", "ps-state-bad")
            state.classes(add=words[not shown], remove=words[shown])

    view.on_tick(tick)


# --- blocks ------------------------------------------------------------------------------------


@contextlib.contextmanager
def panel(title: str = "", classes: str = "") -> Iterator[TextElement]:
    """A part of a page, with a title where it has one."""
    with tag("section", classes=f"ps-panel {classes}") as section:
        if title:
            section.props["aria-label"] = title
            tag("h2", title)
        yield section


@contextlib.contextmanager
def facts() -> Iterator[None]:
    """A list of names and values; fill it with `fact`."""
    with tag("dl", classes="ps-facts"):
        yield


def fact(label: str, text: str = "–") -> TextElement:
    """One name and its value. The element of the value, for `set_text`."""
    with tag("div"):
        tag("dt", label)
        return tag("dd", text)


def badge(text: str, kind: str = "") -> TextElement:
    """A word with a colour: "", "ok", "warn" or "bad"."""
    return tag("span", text, f"ps-badge ps-{kind}" if kind else "ps-badge")


def button(text: str, on_click: Callable[[], Any], kind: str = "") -> TextElement:
    """A button: "", "quiet", "primary" or "danger". `on_click` may be a coroutine function."""
    element = tag("button", text, f"ps-button ps-{kind}" if kind else "ps-button", type="button")
    element.on("click", lambda: on_click(), args=[])
    return element


async def confirm(title: str, text: str, action: str, *, word: str = "", kind: str = "danger") -> bool:
    """Ask before something is done. With `word`, the visitor has to type it first."""
    with ui.dialog() as dialog, tag("div", classes="ps-panel ps-dialog", role="document"):
        dialog.props["aria-label"] = title
        tag("h2", title)
        tag("p", text)
        typed = None
        if word:
            tag("p", f"To go on, type: {word}")
            typed = ui.input().props('outlined dense autofocus autocomplete="off"').classes("ps-input")
            typed.props["aria-label"] = f"Type {word} to go on"
        with tag("div", classes="ps-actions"):
            button("Cancel", lambda: dialog.submit(False), "quiet")
            go = button(action, lambda: dialog.submit(True), kind)
    if typed is not None:
        field = typed

        def judge() -> None:
            go.props.set_bool("disabled", field.value != word)

        judge()
        field.on_value_change(judge)
    answer = await dialog
    if not dialog.is_deleted:  # else the page was closed meanwhile
        dialog.delete()
    return bool(answer) and (typed is None or typed.value == word)


def style(file: str) -> None:
    """Load a style sheet of the page's own, a file of `assets`."""
    ui.add_head_html(f'<link rel="stylesheet" href="/_penstock/{file}">')


def nothing_here(view: View, title: str = "There is nothing at this address", text: str = "") -> None:
    """What there is to see where there is nothing."""
    with tag("section", classes="ps-empty"):
        tag("h1", title)
        if text:
            tag("p", text)
        if view.may_open(PAGES[0]):
            tag("a", "See all queues", href="/")


def not_allowed(view: View) -> None:
    """What there is to see for somebody who may not see the page."""
    view.client.status_code = 403
    user = view.session.user
    name, may = (user.name, user.words) if user is not None else ("", "")
    title, where = "You may look at no queue", " with some queue"
    if view.queue:
        title, where = "You may not look at this queue", f" with {view.queue}"
    elif view.page.everywhere and view.may(Right.READ):
        title, where = "This page is about all queues", " with every queue"
    elif view.page.right is Right.ADMIN:
        title, where = "This page is for admins", ""
    text = (
        f"It needs the right {view.page.right.word}{where}. You are signed in as {name}, and may: "
        f"{may or 'nothing'}. Rights are given by [[user]] in the broker's settings."
    )
    nothing_here(view, title, text)
