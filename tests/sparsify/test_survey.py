"""What is known of a span holds for the span that was surveyed, and for nothing else.

Covers: compressors that weigh, copy, slice or reorder their span before they select, with and without the survey passed
on, over windows with learned thresholds, with and without compiled kernels, under the engine; spans written to, and
windows that have ended; immutable segments; subclasses whose `select` takes three parameters.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_safusion
from lightning_safusion import Segments, Selection, SpanSurvey, Sparsifier, TopK
from lightning_safusion.fusion.quota import QuotaRule
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify import History, resolve_sparsifier, segmented_view
from lightning_safusion.sparsify.selection.survey import Foresight, Live, Selector
from tests.cluster import Cluster, settings, specs
from tests.looks import note_kernels

SIZES = (20_000, 300, 1, 7_000, 2_000)
EDGES = np.cumsum([0, *SIZES])
WINDOWS = 10
TENSORS = specs([(300, 20), (40,), (1,), (64, 9, 3)])
KERNELS = [pytest.param(True, marks=pytest.mark.skipif(not native.usable(), reason="no compiled kernels")), False]


def cut(pool: int = 0) -> Segments:
    return Segments(EDGES, np.array([400, 3, 1, 200, 20]), tuple(range(5)), tuple((size,) for size in SIZES), pool)


def exact(x: Tensor, segments: Segments) -> list[int]:
    """Positions of the largest of every segment, the first among equals, by sorting."""
    chosen: list[int] = []
    for start, stop, quota in zip(segments.edges[:-1], segments.edges[1:], segments.quotas, strict=True):
        order = x[start:stop].abs().sort(descending=True, stable=True).indices[: int(quota)]
        chosen += (order.sort().values + int(start)).tolist()
    return chosen


def weights(numel: int, step: int) -> Tensor:
    return 0.6 + 0.8 * torch.rand(numel, generator=torch.Generator().manual_seed(step))


class Weighing(Sparsifier):
    """The largest of a weighted span; compares each selection with a sort."""

    name = "weighing"
    estimates = False

    def __init__(self) -> None:
        self.selected = self.wrong = 0

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        return self.top(x, segments, step, None)

    def top(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None) -> Selection:
        weighted = x * weights(len(x), step)
        indices = segmented_view(weighted, segments, survey).top().indices
        self.selected += 1
        self.wrong += indices.tolist() != exact(weighted, segments)
        return Selection(indices, x[indices], len(indices))


class Surveyed(Weighing):
    """Passes on what is known of another span than its own; selects from its own as well."""

    def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
        chosen = self.top(x, segments, step, survey)
        self.wrong += segmented_view(x, segments, survey).top().indices.tolist() != exact(x, segments)
        return chosen


class WeighedTopK(TopK):
    """A compressor of this package, and the three parameters that `select` has for everybody."""

    def __init__(self) -> None:
        self.selected = self.wrong = 0

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:  # type: ignore[override]  # as of old
        weighted = x * weights(len(x), step)
        indices = super().select(weighted, segments, step).indices
        self.selected += 1
        self.wrong += indices.tolist() != exact(weighted, segments)
        return Selection(indices, x[indices], len(indices))


@pytest.mark.parametrize("make", [Weighing, Surveyed, WeighedTopK])
@pytest.mark.parametrize("compiled", KERNELS)
def test_a_compressor_that_weighs_its_span_selects_exactly_under_the_engine(
    make: type[Weighing | WeighedTopK], compiled: bool
) -> None:
    cluster = Cluster(2, lambda: settings(make(), quota="proportional", collective="allgather"), TENSORS)
    with nullcontext() if compiled else native.unused():
        for step in range(25):
            cluster.step(cluster.random_grads(step))
    cluster.close()
    for engine in cluster.engines:
        compressor: Any = engine.space.selector.sparsifier
        assert compressor.selected >= 25
        assert compressor.wrong == 0


@pytest.mark.skipif(not native.usable(), reason="no compiled kernels")
@pytest.mark.parametrize("quota", ["proportional", "pooled"])
def test_the_engine_selects_from_what_was_found_while_gradients_were_added(
    quota: QuotaRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    note_kernels(monkeypatch, lambda name, _: calls.append(name))
    cluster = Cluster(1, lambda: settings(quota=quota, collective="allgather"), TENSORS)
    for step in range(40):
        cluster.step(cluster.random_grads(step))
    cluster.close()
    assert calls.count("add") >= 40
    # in the first windows, and where a predicted threshold was wrong
    assert calls.count("survey") < calls.count("add") / 2


def ordered(x: Tensor, segments: Segments) -> tuple[Tensor, Segments]:
    return x.flip(0), Segments(EDGES[-1] - EDGES[::-1], segments.quotas[::-1], segments.keys, segments.shapes)


def sliced(x: Tensor, segments: Segments) -> tuple[Tensor, Segments]:
    return x[: EDGES[4]], Segments(EDGES[:5], segments.quotas[:4], segments.keys[:4], segments.shapes[:4])


OTHER_SPANS: dict[str, Callable[[Tensor, Segments], tuple[Tensor, Segments]]] = {
    "weighted": lambda x, segments: (x * weights(len(x), 1), segments),
    "copied": lambda x, segments: (x.clone().mul_(weights(len(x), 2)), segments),
    "another vector": lambda x, segments: (torch.randn(len(x)), segments),
    "reordered": lambda x, segments: (x[torch.randperm(len(x))], segments),
    "mirrored": ordered,
    "sliced": sliced,
    "cut anew": lambda x, segments: (x, segments.skipping(np.arange(5) == 3)),
}


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("name", OTHER_SPANS)
def test_of_other_spans_nothing_is_known(name: str, compiled: bool) -> None:
    torch.manual_seed(0)
    segments = cut()
    history, parts = History(segments), native.Parts.between(EDGES.tolist())
    ahead, memory = Foresight(history, EDGES.tolist()), torch.zeros(int(EDGES[-1]))
    with nullcontext() if compiled else native.unused():
        for _ in range(WINDOWS):
            grads = [torch.randn(size) * (1 + i) for i, size in enumerate(SIZES)]
            found = None
            if compiled:
                found = native.add_finite(memory, parts, grads, 1.0, ahead.wanted()).found
            else:
                torch._foreach_add_(list(memory.split(list(SIZES))), grads)
            x = memory[:]
            with ahead.known(x, found) as survey:
                span, other = OTHER_SPANS[name](x, segments)
                assert segmented_view(span, other, survey).top().indices.tolist() == exact(span, other)
                chosen = segmented_view(x, segments, survey).top()
            assert chosen.indices.tolist() == exact(x, segments)
            memory[chosen.indices] = 0


@pytest.mark.skipif(not native.usable(), reason="no compiled kernels")
@pytest.mark.parametrize("change", ["written to", "ended", "moved"])
def test_nothing_is_known_any_more(change: str) -> None:
    torch.manual_seed(0)
    segments = cut()
    history, parts = History(segments), native.Parts.between(EDGES.tolist())
    ahead, memory = Foresight(history, EDGES.tolist()), torch.zeros(int(EDGES[-1]))
    for _ in range(4):
        added = native.add_finite(memory, parts, [torch.randn(size) for size in SIZES], 1.0, ahead.wanted())
        x = memory[:]
        with ahead.known(x, added.found) as survey:
            if change == "written to":
                x.mul_(weights(len(x), 3))
            elif change == "moved":
                x.data = x * weights(len(x), 3)
            else:
                survey.__exit__()
                x.numpy()[:] *= weights(len(x), 3).numpy()
            assert segmented_view(x, segments, survey).top().indices.tolist() == exact(x, segments)
            assert survey.take(x, segments) == (None, None)
        segmented_view(memory, segments, SpanSurvey(memory, history)).top()  # learns


@pytest.mark.skipif(not native.usable(), reason="no compiled kernels")
def test_another_view_of_the_same_elements_is_the_same_span() -> None:
    segments, memory = cut(), torch.randn(int(EDGES[-1]) + 5)
    history = History(segments)
    survey = SpanSurvey(memory[5:], history)
    for other in (memory[:-5], memory[5:].clone(), memory[5:].detach().clone()):
        assert survey.take(other, segments) == (None, None)
    assert survey.take(memory[5:], segments)[0] is not None
    memory[0] = 1  # not even one of them
    assert survey.take(memory[5:], segments) == (None, None)


@pytest.mark.skipif(not native.usable(), reason="no compiled kernels")
@pytest.mark.parametrize("pool", [0, 300])
def test_what_was_found_is_handed_out_once(pool: int) -> None:
    segments = cut(pool)
    history, parts, memory = History(segments), native.Parts.between(EDGES.tolist()), torch.zeros(int(EDGES[-1]))
    grads = [torch.randn(size) for size in SIZES]
    selector = Selector(resolve_sparsifier("topk"))
    selector.select(torch.cat(grads), history, 0, SpanSurvey(memory, history))
    assert not history.used  # of another tensor than the one that was surveyed nothing is learned
    selector.select(memory, history, 0)
    ahead = Foresight(history, EDGES.tolist())
    added = native.add_finite(memory, parts, grads, 1.0, ahead.wanted())
    with ahead.known(memory, added.found) as survey:
        assert survey.take(memory, segments)[1] is not None
        likely, seen = survey.take(memory, segments)
        assert likely is not None
        assert seen is None
        assert (survey.take(memory, segments.unpooled)[0] is not None) is bool(pool) or not pool


def test_segments_cannot_be_changed() -> None:
    edges, quotas = np.array([0, 10, 30]), np.array([2, 3])
    segments = Segments(edges, quotas, ("a", "b"), ((10,), (20,)))
    quotas[0], edges[1] = 9, 5
    assert segments.quotas.tolist() == [2, 3]
    assert segments.edges.tolist() == [0, 10, 30]
    for array in (segments.edges, segments.quotas, segments.sizes, segments.skipping(np.array([True, False])).quotas):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(FrozenInstanceError):
        segments.pool = 3  # type: ignore[misc]
    assert not hasattr(segments, "cache")


def test_constants_go_with_their_segments() -> None:
    segments = cut()
    constant = weakref.ref(Live.of(segments))
    assert Live.of(segments) is constant()
    assert Live.of(cut()) is not constant()
    del segments
    gc.collect()
    assert constant() is None


def test_the_view_is_public() -> None:
    assert lightning_safusion.segmented_view is segmented_view
    assert {"segmented_view", "SpanSurvey"} <= set(lightning_safusion.__all__)
