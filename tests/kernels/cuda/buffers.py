"""Buffers for the tests of the kernels (:mod:`lab.gpu.buffers`), drawn by Hypothesis, and what is sent of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from lab.gpu.buffers import DECAY, DEVICE, HOST, Case, Rank, gather
from lightning_safusion.kernels.cuda.buffer import WindowKernels
from lightning_safusion.sparsify.base import Segments

MAGNITUDE = np.int32(0x7FFFFFFF)


def oracle(keys: np.ndarray, segments: Segments) -> np.ndarray:
    """Positions: of every segment its largest, then the largest of all others; the first among equals."""
    bits = keys.view(np.int32) & MAGNITUDE
    taken, live = np.zeros(len(bits), bool), np.zeros(len(bits), bool)
    for start, stop, quota in zip(segments.edges[:-1], segments.edges[1:], segments.quotas, strict=True):
        if quota:
            live[start:stop] = True
            taken[start + np.argsort(-bits[start:stop].astype(np.int64), kind="stable")[:quota]] = True
    rest = np.flatnonzero(live & ~taken)
    taken[rest[np.argsort(-bits[rest].astype(np.int64), kind="stable")[: segments.pool]]] = True
    return np.flatnonzero(taken)


SIZES = st.sampled_from([1, 2, 7, 31, 32, 33, 127, 128, 129, 500, 511, 512, 513, 1023, 1025, 2047, 2049, 3000, 4097])


@st.composite
def cases(draw: Any, values: Sequence[str] = ("normal", "ties", "zeros", "one", "subnormal")) -> Case:
    """Buffers of up to six tensors."""
    sizes = tuple(draw(st.lists(SIZES, min_size=1, max_size=6)))
    dense = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) // 2))
    kinds = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=len(sizes), max_size=len(sizes))))
    density = draw(st.sampled_from([0.3, 0.1, 0.1, 0.02, 0.003]))
    pooled, wire = draw(st.booleans()), draw(st.sampled_from(["q4", "q4", "fp32", "bf16", "fp16"]))
    return Case(sizes, density, pooled, frozenset(dense), kinds, draw(st.sampled_from(list(values))), wire=wire)


#: Seeds of the order of programs; None: as the interpreter has them.
ORDERS = st.none() | st.integers(0, 1000)


@contextmanager
def in_order(seed: int | None) -> Iterator[None]:
    """The interpreter runs the programs of every grid in an order that is drawn from a seed."""
    interpreter = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    place = interpreter.set_grid_idx

    def shuffled(x: int, y: int, z: int) -> None:
        programs = interpreter.grid_dim[0]
        place(int(np.random.default_rng([seed or 0, programs]).permutation(programs)[x]), y, z)

    with pytest.MonkeyPatch.context() as patched:
        if seed is not None:
            patched.setattr(interpreter, "set_grid_idx", shuffled)
        yield


__all__ = [
    "DECAY",
    "DEVICE",
    "HOST",
    "ORDERS",
    "Case",
    "Rank",
    "WindowKernels",
    "cases",
    "gather",
    "in_order",
    "oracle",
]
