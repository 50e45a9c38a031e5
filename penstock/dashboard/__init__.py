"""The dashboard: the broker in a browser, at `/` of the HTTP listener.

It lives in the second process and reads the public API only, as its visitor: what a page shows or does,
anybody with the same token can ask for. NiceGUI draws it, which the extra `dashboard` installs; without
it everything here but `door` stays unimported, and `/` says how to install it.

    door       who may come in: host, origin, session; sign-in and sign-out; what a browser is told to refuse
    sessions   who has signed in
    caller     calls of the API within this process
    feed       the queues as they change, read once for all pages
    poll       answers that are asked for now and then, once for all pages
    web        NiceGUI, started with the first visit
    pages      the table of pages
    view       what the builder of a page works with
    layout     the frame that all pages share, and its building blocks
"""

import importlib.util
from collections.abc import Callable
from typing import Any


def is_installed() -> bool:
    """Whether the extra `dashboard` is there."""
    try:
        return importlib.util.find_spec("nicegui") is not None
    except ImportError:
        return False


def extension() -> Callable[[Any, Any], Any] | None:
    """What makes the dashboard of a site and its API; None where the extra is not there."""
    if not is_installed():
        return None
    from penstock.dashboard.start import Dashboard

    return Dashboard
