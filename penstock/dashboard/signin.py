"""The sign-in page: plain HTML, without a script; nothing of the broker's is on it."""

from html import escape
from typing import Final

from penstock.http.problems import Problem

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Sign in · Penstock</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="/_penstock/favicon.svg">
<link rel="stylesheet" href="/_penstock/penstock.css">
<link rel="stylesheet" href="/_penstock/signin.css">
<script src="/_penstock/theme.js"></script>
</head>
<body class="ps-signin">
<main>
<form method="post" action="/sign-in" class="ps-panel">
<h1><img src="/_penstock/favicon.svg" alt="" width="28" height="28"> Penstock</h1>
<p>This broker asks for a token. It is that of a <code>[[user]]</code> in its settings.</p>
{notice}<input name="username" type="text" autocomplete="username" value="penstock" hidden>
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus{described}>
<input name="next" type="hidden" value="{target}">
<button type="submit">Sign in</button>
</form>
</main>
</body>
</html>
"""

_WRONG: Final = '<p id="wrong" class="ps-notice" role="alert">{text}</p>\n'

_STEP: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penstock</title>
<meta http-equiv="refresh" content="0;url={target}"></head><body></body></html>
"""


def page(target: str, *, wrong: Problem | None = None) -> str:
    """The form, that leads to `target`."""
    text = "" if wrong is None else f"{wrong.detail[0].upper()}{wrong.detail[1:]}."
    if wrong is not None and wrong.name == "unauthorized" and "time of user" not in text:
        text = "This token is not known here."
    return _PAGE.format(
        notice=_WRONG.format(text=escape(text)) if text else "",
        described=' aria-describedby="wrong" aria-invalid="true"' if wrong else "",
        target=escape(target),
    )


def step_page(target: str) -> str:
    """A page that does nothing but load `target`."""
    return _STEP.format(target=escape(target))
