"""Elements that other compressors than Top-k choose, against the compiled kernels of the CPU, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from lab.gpu.buffers import DECAY, DEVICE, Case, Rank
from lightning_safusion.comm.exchange import Part
from lightning_safusion.kernels.cuda.chosen import PlacedKernels, ThresholdKernels
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.view import NumpyView
from tests.kernels.cuda.buffers import ORDERS, cases, differing, in_order, kernels_of

EXAMPLES = 5  # a fifth of a second each in the interpreter


def expected(rank: Rank, accumulated: Tensor, selection: Selection) -> Tensor:
    """The message as the CPU writes it."""
    rank.exchange.encode(accumulated, Part(selection, torch.ones(len(rank.grads), dtype=torch.uint8)))
    return rank.exchange.messages[0].clone()


def chosen(segments: Segments, share: float, generator: np.random.Generator) -> np.ndarray:
    """Ascending positions, of each tensor no more than its quota."""
    parts = [np.empty(0, np.int64)]
    for start, size, quota in zip(segments.edges, segments.sizes, segments.quotas, strict=False):
        number = int(generator.integers(0, quota + 1)) if share < 1 else int(quota)
        parts.append(np.sort(start + generator.choice(size, min(number, size), replace=False)))
    return np.concatenate(parts)


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), ORDERS)
def test_known_positions_are_written_as_by_the_cpu(
    case: Case, seed: int, share: float, padded: bool, order: int | None
) -> None:
    rank = Rank.of(replace(case, pooled=False), 0, seed)
    accumulated, segments = rank.expected()[0], rank.case.segments
    if segments is None:
        return
    positions = torch.from_numpy(chosen(segments, share, np.random.default_rng(seed)) if share else np.empty(0, int))
    values, number = accumulated[positions], len(positions)
    told = expected(rank, accumulated, Selection(positions, values, number))
    selection = Selection(positions.to(DEVICE), values.to(DEVICE), number)
    if padded:
        places = torch.arange(segments.capacity - number)
        known = torch.cat([positions, places]), torch.cat([values, torch.zeros(len(places))])
        selection = Selection(*(each.to(DEVICE) for each in known), torch.tensor(number, device=DEVICE))
    kernels = kernels_of(PlacedKernels, rank)
    with in_order(order):
        kernels.locate(rank.grads, None)
        kernels.add(DECAY)
        kernels.place(selection)
        kernels.pack(0)
    assert differing(rank.memory.view(torch.int32), accumulated.view(torch.int32)) == []
    assert differing(kernels.sent, told) == []
    assert kernels.entries() == number


LIMITS = st.sampled_from([0.0, -1.0, 1e-3, 0.3, 1.0, 5.0, 1e30, float("inf"), float("nan")])


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 1000), st.data())
def test_what_exceeds_thresholds_is_written_as_by_the_cpu(case: Case, seed: int, data: st.DataObject) -> None:
    rank = Rank.of(replace(case, pooled=False), 0, seed, [0] * len(case.sizes) if data.draw(st.booleans()) else None)
    (accumulated, keys), segments = rank.expected(), rank.case.segments
    if segments is None:
        return
    thresholds = torch.tensor(data.draw(st.lists(LIMITS, min_size=len(case.sizes), max_size=len(case.sizes))))
    oracle = NumpyView(keys, segments)
    told = expected(rank, accumulated, oracle.take(thresholds).with_values_of(accumulated))
    kernels = kernels_of(ThresholdKernels, rank)
    with in_order(data.draw(ORDERS)):
        weighing = rank.weighing
        kernels.locate(rank.grads, weighing)
        view = kernels.add(DECAY, weighing, segments)
        counts, sums = view.count_above(thresholds.to(DEVICE)).cpu(), [part.cpu() for part in view.moments()]
        magnitudes = view.moments(magnitudes=True)[0].cpu()
        kernels.find(view, thresholds.to(DEVICE))
        kernels.pack(0)
    assert differing(kernels.sent, told) == []
    live = torch.from_numpy(segments.quotas > 0)
    assert torch.equal(counts[live], oracle.count_above(thresholds)[live])
    for found, exact in zip((*sums, magnitudes), (*oracle.moments(), oracle.abs_sums()), strict=True):
        scale = float(magnitudes.abs().max())  # NumPy's squares are rounded to float32
        torch.testing.assert_close(found[live], exact[live], rtol=1e-6, atol=1e-12 * scale)
