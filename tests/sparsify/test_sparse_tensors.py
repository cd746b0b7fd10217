"""Tensors with fewer non-zeros than their quota (gradients of embeddings) are read no more often than dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_safusion import Segments
from lightning_safusion.sparsify import resolve_sparsifier, segmented_view
from lightning_safusion.sparsify.selection.survey import Selector
from tests.looks import note_looks
from tests.sparsify import oracle
from tests.sparsify.oracle import KERNELS, Job, exact_pooled, kernels, needs_kernels

SIZES = (60_000, 300, 20_000, 1)
NUMEL = sum(SIZES)


def cut(pool: int = 0) -> Segments:
    return oracle.cut(SIZES, [1_500, 7, 500, 1] if pool else [6_000, 30, 2_000, 1], pool)


def gradients(step: int, share: float) -> list[Tensor]:
    """Of a first tensor of rows of 50, of which a share is not zero, and three dense ones."""
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(size, generator=generator) for size in SIZES]
    rows = torch.rand(SIZES[0] // 50, generator=generator) < share
    return [grads[0] * rows.repeat_interleave(50), *grads[1:]]


def windows(name: str, segments: Segments, shares: list[float], compiled: bool) -> list[bool]:
    """Whether each selection from a residual is the exact one, where the compressor promises that."""
    job, sparsifier = Job(SIZES, segments), resolve_sparsifier(name)
    right, selector = [], Selector(sparsifier)
    for step, share in enumerate(shares):
        with job.ahead.known(job.memory, job.add(gradients(step, share), compiled)) as survey:
            chosen = selector.select(job.memory, job.history, step, survey)
        right.append(sparsifier.estimates or chosen.indices.tolist() == exact_pooled(job.memory, segments))
        job.memory[chosen.indices] = 0
    return right


@pytest.mark.parametrize("pool", [0, 6_000])
@pytest.mark.parametrize("compiled", KERNELS)
def test_the_first_zeros_fill_up(compiled: bool, pool: int) -> None:
    shares = [0.01, 0.01, 1, 1, 0, 0, 0.02, 0.02, 0.3, 0.001, 0.001, 0.001]
    with kernels(compiled):
        assert all(windows("topk", cut(pool), shares, compiled))


@pytest.mark.parametrize(("share", "pool"), [(0.0, 40_000), (0.001, 6_000), (0.05, 40_000), (1.0, 6_000)])
@pytest.mark.parametrize("compiled", KERNELS)
def test_a_pool_is_filled_in_one_look(compiled: bool, share: float, pool: int) -> None:
    segments = cut(pool)
    with kernels(compiled):
        for x in (torch.cat(gradients(0, share)), torch.cat([gradients(0, share)[0], torch.zeros(NUMEL - SIZES[0])])):
            once, chosen = segmented_view(x, segments).top_pooled(), resolve_sparsifier("topk").select(x, segments, 0)
            assert (once is not None) is compiled
            for found in (chosen,) if once is None else (once, chosen):
                assert found.indices.tolist() == exact_pooled(x, segments)


@pytest.mark.parametrize(
    ("name", "pool"),
    [("topk", 0), ("topk", 6_000), ("gaussiank", 0), ("redsync", 6_000), ("dgc", 0), ("oktopk", 6_000)],
)
@needs_kernels
def test_a_sparse_tensor_is_read_no_more_often(name: str, pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, looks = note_looks(monkeypatch), []
    for share in (1, 0.005):
        read.clear()
        windows(name, cut(pool), [share] * 12, True)
        looks.append(sum(read) / NUMEL)
    assert looks[1] <= looks[0] + 6  # where a predicted threshold was wrong
