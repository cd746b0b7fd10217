"""Memory of large arrays that live for a moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lightning_safusion.kernels.cpu import library as workspace

LARGE = 1 << 18


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    workspace.release()
    yield
    workspace.release()


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_memory_is_used_again_once_nobody_holds_it(dtype: type) -> None:
    first = workspace.empty(LARGE, dtype)
    assert (first.dtype, first.shape, first.flags.writeable) == (np.dtype(dtype), (LARGE,), True)
    first[:] = 1
    held, where = first[5:9], address(first)
    del first
    other = workspace.empty(LARGE, dtype)
    other[:] = 2
    assert held.tolist() == [1] * 4  # a view is enough
    del held
    assert address(workspace.empty(LARGE, dtype)) == where


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    small, large = workspace.empty(LARGE, np.int32), workspace.empty(4 * LARGE, np.int32)
    places = address(small), address(large)
    del small, large
    again = workspace.empty(LARGE, np.int32)
    assert (address(again), address(workspace.empty(4 * LARGE, np.int32))) == places


def test_what_is_too_small_is_replaced() -> None:
    for _ in range(3):
        workspace.empty(LARGE, np.int32)
    assert len(workspace._blocks) == 1
    workspace.empty(100 * LARGE, np.int32).fill(1)
    assert len(workspace._blocks) == 1
    assert workspace._blocks[0].size >= 400 * LARGE


def test_small_arrays_are_numpys_own() -> None:
    array = workspace.empty(10, np.int32)
    assert array.flags.owndata
    assert workspace.empty(0, np.int64).shape == (0,)


def test_memory_that_was_given_back_is_not_there() -> None:
    held = workspace.empty(LARGE, np.int32)
    held[:] = 5
    workspace.empty(LARGE, np.int32)
    assert len(workspace._blocks) == 2
    workspace.release()
    assert len(workspace._blocks) == 1
    assert held.sum() == 5 * LARGE
    del held
    workspace.release()
    assert not workspace._blocks


def test_no_two_threads_have_the_same_memory() -> None:
    def write(number: int) -> bool:
        good = True
        for count in range(200):
            array = workspace.empty(LARGE // 4 + number * count, np.int64)
            array[:100] = number
            good &= bool((array[:100] == number).all())
        return good

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(write, range(4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_memory_of_its_own() -> None:
    workspace.empty(LARGE, np.int32)
    held = workspace.empty(LARGE, np.int32)
    held[:] = 1
    if (child := os.fork()) == 0:
        held[:] = 2
        workspace.empty(LARGE, np.int32)[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (held == 1).all()


@pytest.mark.parametrize("length", [0, 10, LARGE])
def test_pages_of_their_own_hold_zeros(length: int) -> None:
    array = workspace.zeros(length, np.float32)
    assert (array.dtype, array.shape) == (np.float32, (length,))
    assert not array.any()
    array[:] = 1
    assert torch.from_numpy(array).sum() == length


@pytest.mark.parametrize("unit", [1, 5000, 70_001])
def test_runs_change_places_and_their_old_pages_are_given_back(unit: int) -> None:
    runs = [(7 * unit, 9 * unit), (0, 3 * unit), (3 * unit, 3 * unit), (3 * unit, 7 * unit)]
    array = workspace.zeros(9 * unit, np.float32)
    array[:] = np.arange(1, len(array) + 1)
    expected = np.concatenate([array[start:stop] for start, stop in runs])
    moved = workspace.rearranged(array, runs)
    assert np.array_equal(moved, expected)
    if 4 * len(array) >= LARGE and sys.platform == "linux":  # what is left is on pages where two runs meet
        assert np.count_nonzero(array) < 4 * 4096
    array[:] = 0  # it can still be written to
    assert np.array_equal(moved, expected)
