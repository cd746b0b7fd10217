"""Selection in the units of the optimizer's update: elements are compared by their keys, and sent as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify import DecoupledMomentum, History, TopK, span_segments
from lightning_safusion.sparsify.selection.survey import Foresight
from lightning_safusion.sparsify.selection.units import Moment, SpanUnits, UpdateUnits
from tests.cluster import Cluster, settings, specs
from tests.sparsify.oracle import KERNELS, best, kernels, needs_kernels

SHAPES = ((40, 30), (40,), (1,), (64, 9, 3), (300, 230), (230,), (7, 11))
EPSILON = 1e-8


def moments_of(
    seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Second moments over many orders of magnitude, with zeros of elements that were never sent."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        10.0 ** torch.randint(-12, -2, shape, generator=generator) * torch.rand(shape, generator=generator)
        for shape in shapes
    ]
    return [torch.where(torch.rand(each.shape, generator=generator) < 0.2, 0.0, each).to(dtype) for each in made]


def key(x: Tensor, moment: Tensor | None) -> Tensor:
    if moment is None:
        return x
    return x / (torch.from_numpy(np.sqrt(moment.flatten().float().numpy())) + EPSILON)


@pytest.mark.parametrize("used", KERNELS)
def test_parts_of_a_span_may_cross_tensors_and_have_no_moment(used: bool) -> None:
    moments = [Moment(moment, EPSILON) for moment in moments_of(1, [(30,), (0,), (50,)])]
    units = SpanUnits([*moments, None], (0, 30, 30, 80, 100), torch.empty(100))
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    with kernels(used):
        whole = units.weigh(x).clone()
        for runs in ([(10, 90)], [(0, 5), (25, 85)], [(85, 95)]):
            expected = torch.cat([whole[start:stop] for start, stop in runs])
            assert torch.equal(units.within(runs).weigh(torch.cat([x[a:b] for a, b in runs])), expected)


@needs_kernels
def test_kernels_make_the_keys_of_pytorch() -> None:
    sizes = (3_000_000, 1, 0, 37, 5000)
    moments = moments_of(1, [(size,) for size in sizes])
    known = [Moment(moment, EPSILON) for moment in moments]
    known[1], known[3] = Moment(moments[1], 1e-3), None
    edges = np.cumsum([0, *sizes]).tolist()
    x = torch.randn(edges[-1])
    fast = SpanUnits(known, edges, torch.empty_like(x)).weigh(x)
    with native.unused():
        assert torch.equal(fast, SpanUnits(known, edges, torch.empty_like(x)).weigh(x))
    assert torch.equal(fast[edges[3] : edges[4]], x[edges[3] : edges[4]])
    assert torch.equal(fast[: sizes[0]], key(x[: sizes[0]], moments[0]))


@needs_kernels
@pytest.mark.parametrize("written", [False, True])
def test_one_pass_finds_the_keys_above_a_floor(written: bool) -> None:
    sizes = (2_500_000, 40, 9000)
    edges = np.cumsum([0, *sizes]).tolist()
    moments = moments_of(2, [(size,) for size in sizes])
    units = SpanUnits([Moment(moments[0], EPSILON), None, Moment(moments[2], EPSILON)], edges, torch.zeros(edges[-1]))
    memory, grads = torch.randn(edges[-1]), [torch.randn(size) for size in sizes]
    whole = 0.9 * memory + torch.cat(grads)
    keys = torch.cat(
        [key(each, moment) for each, moment in zip(whole.split(sizes), (moments[0], None, moments[2]), strict=True)]
    )
    floors = np.array([keys[:100].abs().max().item(), 1.0, 1e4], np.float32).view(np.int32)
    wanted = native.Wanted(floors, len(keys), "magnitudes", units.weights, units.keys.numpy() if written else None)
    found = native.add_finite(memory, native.Parts.between(edges), grads, 0.9, wanted).found
    assert found is not None
    assert found.lists is not None
    assert torch.equal(memory, whole)
    bounds = torch.from_numpy(floors.view(np.float32)).repeat_interleave(torch.tensor(sizes))
    expected = (keys.abs() > bounds).nonzero().view(-1)
    assert found.lists.places.tolist() == expected.tolist()
    assert torch.equal(torch.from_numpy(found.lists.bits.view(np.float32)), keys[expected])
    assert found.sums is not None
    sums = [float(piece.double().abs().sum()) for piece in keys.split(sizes)]
    np.testing.assert_allclose(found.sums, sums, rtol=1e-4)
    assert torch.equal(units.keys, keys if written else torch.zeros_like(keys))


def trained(
    state: Callable[[int], list[Tensor | None]], windows: int = 12, workers: int = 1, **options: Any
) -> tuple[Cluster, Tensor, Tensor]:
    """Some windows; what went in and what came out at the first worker, [windows, D] each."""
    cluster = Cluster(workers, lambda: settings(**({"collective": "allgather"} | options)), specs(SHAPES))
    given, got = [], []
    for window in range(windows):
        known = state(window)

        def moments(indices: Sequence[int], known: list[Tensor | None] = known) -> list[Moment | None]:
            each = [known[index] for index in indices]
            return [None if own is None else Moment(own.flatten(), EPSILON) for own in each]

        for engine in cluster.engines:
            engine.space.selector.units = UpdateUnits(moments, torch.device("cpu"))
        grads = cluster.random_grads(window)
        given.append(torch.cat(grads[0]))
        got.append(torch.cat(cluster.step(grads)[0]))
    cluster.close()
    return cluster, torch.stack(given), torch.stack(got)


@pytest.mark.parametrize("used", KERNELS)
@pytest.mark.parametrize(("fusion", "momentum"), [("single", None), ("wfbp", 0.5), ("aligned", None)])
def test_the_engine_sends_the_largest_keys(used: bool, fusion: str, momentum: float | None) -> None:
    def state(window: int) -> list[Tensor | None]:
        if window < 3:
            return [None] * len(SHAPES)  # the optimizer has not stepped
        known: list[Tensor | None] = list(moments_of(window // 3))
        known[3] = None
        known[0] = known[0].bfloat16() if window > 8 and known[0] is not None else known[0]
        return known

    memory: Any = "residual" if momentum is None else DecoupledMomentum(momentum)  # a half: products are exact
    with kernels(used):
        cluster, given, got = trained(state, fusion=fusion, memory=memory)
    engine = cluster.engines[0]
    quotas = dict(zip(engine.space.layout.indices.tolist(), engine.space.quotas.counts.tolist(), strict=True))
    residual = torch.zeros(given.shape[1])
    for window in range(len(given)):
        held = (residual if momentum is None else momentum * residual) + given[window]
        sent = torch.zeros_like(held)
        pieces = [each.split([spec.numel for spec in cluster.specs]) for each in (held, sent)]
        for index, (all_of_it, part) in enumerate(zip(*pieces, strict=True)):
            chosen = best(key(all_of_it, state(window)[index]), 0, len(part), quotas[index])
            part[chosen] = all_of_it[chosen]
        assert torch.equal(got[window], sent), window
        residual = held - sent


@needs_kernels
@pytest.mark.parametrize(
    ("compressor", "quota"),
    [
        *((name, "proportional") for name in ("topk", "dgc", "sidco", "oktopk", "none")),
        *((name, "pooled") for name in ("gaussiank", "redsync", "adtopk", "randomk")),
    ],
)
def test_every_compressor_compares_keys_and_sends_values(compressor: str, quota: str) -> None:
    def state(window: int) -> list[Tensor | None]:
        return list(moments_of(window // 3))

    options: dict[str, Any] = {"compressor": compressor, "quota": quota, "workers": 2, "windows": 5}
    _, _, fast = trained(state, **options)
    with native.unused():
        _, _, slow = trained(state, **options)
    assert torch.equal(fast, slow)
    _, _, gradient = trained(lambda _: [None] * len(SHAPES), **options)
    assert torch.equal(fast, gradient) == (compressor in ("randomk", "none"))  # these compare nothing


@pytest.mark.parametrize("used", KERNELS)
@pytest.mark.parametrize("options", [{"quota": "pooled"}, {"scope": "group"}])
def test_tensors_that_compete_are_compared_in_one_unit(used: bool, options: dict[str, Any]) -> None:
    some: list[Tensor | None] = [*moments_of(5)[:-1], None]
    with kernels(used):
        _, _, mixed = trained(lambda _: some, fusion="single", **options)
        _, _, plain = trained(lambda _: [None] * len(SHAPES), fusion="single", **options)
    assert torch.equal(mixed, plain)


@needs_kernels
def test_a_span_is_written_only_if_it_is_read() -> None:
    x = torch.randn(50_000)
    (moment,) = moments_of(7, [(50_000,)])
    segments = span_segments(50_000, 500)
    history = History(segments)
    writes: list[int] = []
    foresight, parts = Foresight(history, [0, 50_000]), native.Parts.between([0, 50_000])
    units = SpanUnits([Moment(moment, EPSILON)], [0, 50_000], torch.full((50_000,), torch.nan))

    for step in range(6):
        found = native.add_finite(torch.zeros_like(x), parts, [x], 1.0, foresight.wanted(units.weights)).found

        def write() -> None:
            writes.append(step)  # noqa: B023 - called in this turn
            units.weigh(x)

        with foresight.known(units.keys, found, write) as survey:
            chosen = TopK().select(units.keys, segments, step, survey)
        assert chosen.indices.tolist() == best(key(x, moment), 0, len(x), 500)
    assert 0 < len(writes) < 6
