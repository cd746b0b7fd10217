"""The flat vector of a memory: what it remembers of lists of tensors has a bound.

Covers: another list in each of many windows, of a vector and of a job whose layers drop out; lists that come back.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_safusion.kernels import cpu
from lightning_safusion.sparsify.memory.contract import Flat
from tests.cluster import Cluster, settings, specs


def growth(work: Callable[[int], None], windows: int) -> int:
    """Bytes that are held after some windows, and were not before."""
    gc.collect()
    tracemalloc.start()
    try:
        for window in range(windows):
            work(window)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_other_lists_in_every_window_take_no_more_memory() -> None:
    tensors = 200
    flat = Flat(list(range(0, 10 * tensors + 1, 10)), torch.device("cpu"))
    rng = np.random.default_rng(0)

    def window(_: int) -> None:
        ids = tuple(np.flatnonzero(rng.random(tensors) < 0.9).tolist())
        parts = flat.parts[ids]
        assert parts is not None
        assert parts.starts.tolist() == [10 * i for i in ids]
        assert parts.sizes.tolist() == [10] * len(ids)

    for each in range(10):
        window(each)
    assert growth(window, 1000) < 100_000


def test_a_list_that_comes_back_is_remembered() -> None:
    flat = Flat(list(range(0, 101, 10)), torch.device("cpu"))
    assert flat.parts[0, 1, 2] is flat.parts[0, 1, 2]
    assert flat.parts[0, 2, 5] is flat.parts[0, 2, 5]


@pytest.mark.slow
@pytest.mark.skipif(not cpu.usable(), reason="needs compiled kernels")
@pytest.mark.filterwarnings("ignore:.* tensors .* were computed on some ranks only")
def test_layers_that_drop_out_take_no_more_memory() -> None:
    described = specs([(20,)] * 60)
    cluster = Cluster(1, lambda: settings(collective="allgather", fusion="single"), described)
    rng = np.random.default_rng(0)
    grads = cluster.random_grads(0)

    def window(_: int) -> None:
        cluster.step(grads, [(rng.random(60) < 0.8).tolist()])

    try:
        for each in range(50):
            window(each)
        assert growth(window, 400) < 100_000
    finally:
        cluster.close()
