"""Build: whether the hot modules run compiled, or as the sources that they are. Both do the same."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Final

ONE_OF_THEM: Final = "penstock.model.ranges"


def is_compiled() -> bool:
    """Whether this process runs the compiled modules. They come together, or not at all."""
    spec = find_spec(ONE_OF_THEM)
    return spec is not None and (spec.origin or "").endswith(tuple(EXTENSION_SUFFIXES))


COMPILED: Final = is_compiled()
"""For those who have one way for each build, because what is quick in one of them is slow in the other."""
