"""The checksum of this machine against zlib's: a log is read by either. And isal is what has it here."""

import platform
import subprocess
import sys
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.log.checksum import crc32


@given(st.binary(max_size=300), st.integers(0, 0xFFFFFFFF), st.integers(0, 20))
@example(bytes(range(256)) * 300, 0, 1)
def test_it_is_what_zlib_says(data: bytes, before: int, start: int) -> None:
    view = memoryview(data)[start:]
    assert crc32(data) == zlib.crc32(data)
    assert crc32(view, before) == zlib.crc32(view, before)


@pytest.mark.parametrize("size", [*range(130), 4095, 4096, 1 << 16, (1 << 18) + 5])
def test_every_length_of_a_step(size: int) -> None:
    data = bytes(i * 37 % 251 for i in range(size))
    assert crc32(data, crc32(data)) == zlib.crc32(data + data)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="isal has no wheel for it")
def test_it_is_the_quick_one() -> None:
    from isal import isal_zlib

    assert crc32 is isal_zlib.crc32


def test_without_isal_it_is_zlib_s() -> None:
    script = (
        "import sys; sys.modules['isal'] = None; import zlib; from penstock.log import checksum; "
        "sys.exit(checksum.crc32 is not zlib.crc32)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        crc32("text")
