"""The base of every error that a user of Penstock may see.

An error's type says whose fault it is; its text says who, what, and what to do now.
"""


class PenstockError(Exception):
    """Something a person can read and act on; commands print it as one line."""


class Misuse(PenstockError):
    """A command line, or a call, that cannot be meant. Nothing was done; a command ends with exit code 2."""
