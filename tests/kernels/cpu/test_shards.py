"""What is sent to the owners of shards and taken out of these: the limits of the compiled functions.

What they write and find otherwise is compared with NumPy and PyTorch in tests/comm/test_shards.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cpu import Parts
from tests.sparsify.oracle import needs_kernels

pytestmark = needs_kernels
PARTS = Parts.of(np.array([100, 300]), np.array([70, 5]))


def sums(**of: float) -> np.ndarray:
    """Those of 75 elements, zeros but for some: ``at3=1.0``."""
    found = np.zeros(75, np.float32)
    for place, value in of.items():
        found[int(place[2:])] = value
    return found


def leaving(of: np.ndarray, places: list[int], values: list[float], room: int) -> tuple[list[int], list[float]] | None:
    found = native.leaving(of, PARTS, np.array(places, np.int64), np.array(values, np.float32), room)
    return None if found is None else (found[0].tolist(), found[1].tolist())


def test_what_leaves_is_at_ascending_positions_of_the_span() -> None:
    of = sums(at3=1.0, at64=2.0, at69=-3.0, at70=4.0)
    expected = [103, 110, 169, 300, 304], [-1.0, 5.0, 3.0, -4.0, 6.0]
    assert leaving(of, [110, 164, 304], [5.0, 2.0, 6.0], 5) == expected
    assert leaving(sums(), [], [], 0) == ([], [])


@pytest.mark.parametrize("room", range(5))
def test_without_room_nothing_is_said(room: int) -> None:
    of = sums(at3=1.0, at64=2.0, at69=-3.0, at70=4.0)
    assert leaving(of, [110, 164, 304], [5.0, 2.0, 6.0], room) is None


@pytest.mark.parametrize("places", [[99], [170], [305], [120, 110], [110, 110]])
def test_what_is_delivered_lies_in_the_shard_in_order(places: list[int]) -> None:
    assert leaving(sums(), places, [1.0] * len(places), 75) is None


def test_what_is_no_number_leaves() -> None:
    found = leaving(sums(at1=np.nan), [], [], 1)
    assert found[0] == [101]
