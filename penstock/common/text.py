"""Text that came from somebody, made fit for one line."""


def printable(text: str) -> str:
    """Text that cannot do anything to a terminal or fake a line: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
