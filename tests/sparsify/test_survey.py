"""What is known of a span holds for the span that was surveyed, and for nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion import Segments, SpanSurvey
from lightning_safusion.lookup import QuotaRule
from lightning_safusion.sparsify import History, resolve_sparsifier, segmented_view
from lightning_safusion.sparsify.selection.survey import Live, Selector
from tests.cluster import Cluster, settings, specs
from tests.looks import note_kernels
from tests.sparsify import oracle
from tests.sparsify.oracle import KERNELS, Job, exact_top, kernels, needs_kernels

SIZES, QUOTAS = (20_000, 300, 1, 7_000, 2_000), (400, 3, 1, 200, 20)
WINDOWS = 10
TENSORS = specs([(300, 20), (40,), (1,), (64, 9, 3)])


def cut(pool: int = 0) -> Segments:
    return oracle.cut(SIZES, QUOTAS, pool)


def gradients() -> list[Tensor]:
    return [torch.randn(size) * (1 + i) for i, size in enumerate(SIZES)]


def weights(numel: int, step: int) -> Tensor:
    return 0.6 + 0.8 * torch.rand(numel, generator=torch.Generator().manual_seed(step))


@needs_kernels
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


OTHER_SPANS: dict[str, Callable[[Tensor, Segments], tuple[Tensor, Segments]]] = {
    "weighted": lambda x, segments: (x * weights(len(x), 1), segments),
    "copied": lambda x, segments: (x.clone().mul_(weights(len(x), 2)), segments),
    "another vector": lambda x, segments: (torch.randn(len(x)), segments),
    "reordered": lambda x, segments: (x[torch.randperm(len(x))], segments),
    "mirrored": lambda x, segments: (x.flip(0), oracle.cut(SIZES[::-1], QUOTAS[::-1])),
    "sliced": lambda x, segments: (x[: sum(SIZES[:4])], oracle.cut(SIZES[:4], QUOTAS[:4])),
    "cut anew": lambda x, segments: (x, segments.skipping(np.arange(5) == 3)),
}


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("name", OTHER_SPANS)
def test_of_other_spans_nothing_is_known(name: str, compiled: bool) -> None:
    torch.manual_seed(0)
    segments = cut()
    job = Job(SIZES, segments)
    with kernels(compiled):
        for _ in range(WINDOWS):
            found, x = job.add(gradients(), compiled), job.memory[:]
            with job.ahead.known(x, found) as survey:
                span, other = OTHER_SPANS[name](x, segments)
                assert segmented_view(span, other, survey).top().indices.tolist() == exact_top(span, other)
                chosen = segmented_view(x, segments, survey).top()
            assert chosen.indices.tolist() == exact_top(x, segments)
            job.memory[chosen.indices] = 0


@needs_kernels
@pytest.mark.parametrize("change", ["written to", "ended", "moved"])
def test_nothing_is_known_any_more(change: str) -> None:
    torch.manual_seed(0)
    segments = cut()
    job = Job(SIZES, segments)
    for _ in range(4):
        found, x = job.add(gradients()), job.memory[:]
        with job.ahead.known(x, found) as survey:
            if change == "written to":
                x.mul_(weights(len(x), 3))
            elif change == "moved":
                x.data = x * weights(len(x), 3)
            else:
                survey.__exit__()
                x.numpy()[:] *= weights(len(x), 3).numpy()
            assert segmented_view(x, segments, survey).top().indices.tolist() == exact_top(x, segments)
            assert survey.take(x, segments) == (None, None)
        segmented_view(job.memory, segments, SpanSurvey(job.memory, job.history)).top()  # learns


@needs_kernels
def test_another_view_of_the_same_elements_is_the_same_span() -> None:
    segments, memory = cut(), torch.randn(sum(SIZES) + 5)
    history = History(segments)
    survey = SpanSurvey(memory[5:], history)
    for other in (memory[:-5], memory[5:].clone(), memory[5:].detach().clone()):
        assert survey.take(other, segments) == (None, None)
    assert survey.take(memory[5:], segments)[0] is not None
    memory[0] = 1  # not even one of them
    assert survey.take(memory[5:], segments) == (None, None)


@needs_kernels
@pytest.mark.parametrize("pool", [0, 300])
def test_what_was_found_is_handed_out_once(pool: int) -> None:
    segments = cut(pool)
    job, grads, selector = Job(SIZES, segments), gradients(), Selector(resolve_sparsifier("topk"))
    memory, history = job.memory, job.history
    selector.select(torch.cat(grads), history, 0, SpanSurvey(memory, history))
    assert not history.used  # of another tensor than the one that was surveyed nothing is learned
    selector.select(memory, history, 0)
    with job.ahead.known(memory, job.add(grads)) as survey:
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


def test_constants_go_with_their_segments() -> None:
    segments = cut()
    constant = weakref.ref(Live.of(segments))
    assert Live.of(segments) is constant()
    assert Live.of(cut()) is not constant()
    del segments
    gc.collect()
    assert constant() is None
