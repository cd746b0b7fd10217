"""CRC-32C: the value that everybody knows; instructions, tables and Python agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cpu.library import kernels


def test_it_is_castagnolis() -> None:
    digits = np.frombuffer(bytearray(b"123456789"), np.uint8)
    assert native.crc32c(digits) == 0xE3069283
    with native.unused():
        assert native.crc32c(digits) == 0xE3069283


@given(content=st.binary(max_size=300), offset=st.integers(0, 8))
def test_instructions_tables_and_python_agree(content: bytes, offset: int) -> None:
    data = np.frombuffer(bytearray(bytes(offset) + content), np.uint8)[offset:]
    compiled = native.crc32c(data)
    assert kernels().safusion_crc32c(data, len(data), 1) == compiled  # as on a processor without instructions
    with native.unused():
        assert native.crc32c(data) == compiled
