"""The selection kernels against the CPU path, bit for bit; in Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lightning_safusion.kernels.cuda import launch as launch_module
from lightning_safusion.kernels.cuda.launch import BLOCK, Chunks
from lightning_safusion.kernels.cuda.view import TritonView
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.selection import select
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.selection.view import NumpyView, SegmentedView
from tests.sparsify.oracle import check, cut, exact_take, exact_top

pytestmark = pytest.mark.slow  # seconds each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_host(selection: Selection) -> Selection:
    return Selection(selection.indices.cpu(), selection.values.cpu(), int(selection.count))


def view(x: Tensor, segments: Segments) -> TritonView:
    return TritonView(x.to(DEVICE), segments)


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def few_bits(x: Tensor) -> Tensor:
    return (x * 2).round()


def mostly_zero(x: Tensor) -> Tensor:
    return torch.where(x.abs() > 2.5, x, 0.0)


def wide(x: Tensor) -> Tensor:
    return x**9 * 1e-20  # denormals too


def not_finite(x: Tensor) -> Tensor:
    x[::97] = torch.nan
    x[::89] = -torch.inf
    return x


def one_value(x: Tensor) -> Tensor:
    return torch.full_like(x, -0.25)


KINDS: list[Callable[[Tensor], Tensor]] = [
    torch.clone,
    lambda x: x.bfloat16().float(),
    lambda x: x.half().float(),
    few_bits,
    mostly_zero,
    wide,
    not_finite,
    one_value,
]
KIND_NAMES = ["float32", "bfloat16", "float16", "few bits", "mostly zero", "wide", "not finite", "one value"]

# empty, single, left out, quota of all, several blocks
SIZES, QUOTAS = [0, 1, 300, 2 * BLOCK + 17, 1, 5000, 3], [0, 1, 7, 160, 0, 5000, 0]


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_top_is_exact(kind: Callable[[Tensor], Tensor]) -> None:
    segments = cut(SIZES, QUOTAS)
    x = kind(noise(sum(SIZES)))
    selection = on_host(view(x, segments).top())
    check(selection, x, exact_top(x, segments))
    assert torch.equal(selection.indices, NumpyView(x, segments).top().indices)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_take_is_exact(kind: Callable[[Tensor], Tensor]) -> None:
    segments = cut(SIZES, QUOTAS)
    x = kind(noise(sum(SIZES), 1))
    some = float(x[400].abs())  # a value that occurs
    # nothing above; few above; more than the quota above; NaN and negative thresholds
    for thresholds in ([1.0, 9.0, some, 0.3, 0.0, 1.0, 1.0], [0.0, -1.0, torch.nan, torch.inf, 1.0, some, -0.0]):
        selection = on_host(view(x, segments).take(torch.tensor(thresholds, device=DEVICE)))
        expected = NumpyView(x, segments).take(torch.tensor(thresholds))
        check(selection, x, expected.indices.tolist())
        assert len(selection.indices) == segments.capacity


def test_segments_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "PROGRAMS", 3)
    sizes, quotas = [3 * BLOCK + 5, 9 * BLOCK, 2], [900, 2000, 1]  # ties are used up by the first chunk
    segments, x = cut(sizes, quotas), few_bits(noise(sum(sizes)))
    layout = Chunks.of(segments, torch.device(DEVICE))
    assert layout.longest > 1
    assert layout.table[2].sub(layout.table[1]).max() > BLOCK  # and of several blocks
    check(on_host(view(x, segments).top()), x, exact_top(x, segments))
    thresholds = [1.5, 9.0, 0.5]
    chosen = on_host(view(x, segments).take(torch.tensor(thresholds, device=DEVICE)))
    check(chosen, x, exact_take(x, segments, thresholds))


@pytest.mark.parametrize("quotas", [[0, 0, 0], [3, 0, 0]])
def test_nothing_to_select(quotas: Sequence[int]) -> None:
    segments = cut([0, 4, 5], quotas)
    x = noise(9)
    assert len(on_host(view(x, segments).top()).indices) == 0
    assert on_host(view(x, segments).take(torch.zeros(3, device=DEVICE))).count == 0
    assert view(x, segments).kth_largest(np.array([0, 0, 0])).cpu().tolist() == [torch.inf] * 3


@pytest.mark.parametrize("kind", KINDS[:5], ids=KIND_NAMES[:5])
def test_statistics_are_those_of_the_cpu(kind: Callable[[Tensor], Tensor]) -> None:
    x, segments = kind(noise(sum(SIZES), 2)), cut(SIZES, QUOTAS)
    live = torch.from_numpy((segments.quotas > 0) & (segments.sizes > 0))
    ours, theirs = view(x, segments), NumpyView(x, segments)
    limits = torch.full((len(SIZES),), 0.7)

    def near(result: Tensor, expected: Tensor) -> None:
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result.cpu()[live], expected[live], rtol=1e-5, atol=1e-3)

    for name in ("abs_sums", "abs_max"):
        near(getattr(ours, name)(), getattr(theirs, name)())
    for magnitudes in (False, True):
        for result, expected in zip(
            ours.moments(magnitudes=magnitudes), theirs.moments(magnitudes=magnitudes), strict=True
        ):
            near(result, expected)
    near(ours.count_above(limits.to(DEVICE)), theirs.count_above(limits))
    for result, expected in zip(ours.tail_moments(limits.to(DEVICE)), theirs.tail_moments(limits), strict=True):
        near(result, expected)
    for result, expected in zip(ours.log_abs_sums(), theirs.log_abs_sums(), strict=True):
        near(result, expected)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=["float32", "few bits"])
def test_kth_largest_is_exact(kind: Callable[[Tensor], Tensor]) -> None:
    x, segments = kind(noise(sum(SIZES), 3)), cut(SIZES, QUOTAS)
    for ranks in (np.array([0, 1, 300, 1, 1, 5000, 1]), np.array([0, 0, 150, 12_000, 1, 1, 2])):
        ours, theirs = view(x, segments).kth_largest(ranks), NumpyView(x, segments).kth_largest(ranks)
        live = torch.from_numpy((segments.quotas > 0) & (segments.sizes > 0))
        assert torch.equal(ours.cpu()[live], theirs[live])


def test_the_same_bits_every_time() -> None:
    segments, x = cut(SIZES, QUOTAS), few_bits(noise(sum(SIZES), 4))

    def run() -> list[Any]:
        once = view(x, segments)
        top, take = once.top(), once.take(torch.full((len(SIZES),), 0.2, device=DEVICE))
        return [top.indices, top.values, take.indices, take.values, once.abs_sums(), *once.log_abs_sums()]

    live = torch.from_numpy((segments.quotas > 0) & (segments.sizes > 0))
    for first, second in zip(run(), run(), strict=True):
        if len(first) == len(live):
            first, second = first.cpu()[live], second.cpu()[live]
        assert torch.equal(first, second)


@pytest.mark.parametrize("pool", [0, 40])
@pytest.mark.parametrize("name", ["topk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "oktopk", "none"])
def test_sparsifiers_choose_what_they_choose_on_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str, pool: int) -> None:
    sizes, quotas = [BLOCK + 3, 1, 0, 700], [90, 1, 0, 9]
    x = noise(sum(sizes), 5)
    chosen = []
    backends: list[type[SegmentedView]] = [NumpyView, TorchView, TritonView]
    for backend in backends:
        device = DEVICE if backend is TritonView else "cpu"
        for name_of_view in ("NumpyView", "NativeView"):  # what spans in host memory are read with
            monkeypatch.setattr(select, name_of_view, lambda x, segments, *_, backend=backend: backend(x, segments))
        selection = resolve_sparsifier(name).select(x.to(device), cut(sizes, quotas, pool), 0)
        chosen.append(on_host(selection))
    for other in chosen[1:]:
        assert int(other.count) == int(chosen[0].count)
        assert torch.equal(other.indices[: other.count], chosen[0].indices)
        assert torch.equal(other.values[: other.count], chosen[0].values)
