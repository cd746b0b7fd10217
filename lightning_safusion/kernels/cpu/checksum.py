"""CRC-32C of bytes (Castagnoli's polynomial, as in iSCSI: RFC 3720, section 12.1)."""

from __future__ import annotations

from functools import cache

import numpy as np

from lightning_safusion.kernels.cpu.library import kernels, usable

_POLYNOMIAL = 0x82F63B78  # the lowest bit first


def crc32c(data: np.ndarray) -> int:
    """The checksum of uint8 [B], contiguous; that of ``b"123456789"`` is 0xE3069283.

    The compiled kernel asks the processor for its own instructions. Without it Python reads byte by byte, about ten
    megabytes per second.
    """
    if usable():
        found: int = kernels().safusion_crc32c(data, len(data), 0)
        return found
    table, crc = _table(), 0xFFFFFFFF
    for byte in data.tobytes():
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> list[int]:
    table = np.arange(256)
    for _ in range(8):
        table = table >> 1 ^ (table & 1) * _POLYNOMIAL
    found: list[int] = table.tolist()
    return found
