"""Helpers of these tests make assertions too; when one fails, pytest shows the values in it."""

import pytest

pytest.register_assert_rewrite("tests.engines")
