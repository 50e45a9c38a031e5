"""What some tests need to know about the build that they run on."""

import pytest

from penstock.build import is_compiled

interpreted_only = pytest.mark.skipif(
    is_compiled(), reason="looks into the Python of a module, which is there where it is not compiled"
)
"""For tests of the sources themselves. `make test` runs them all; compiled, there is nothing to look into."""
