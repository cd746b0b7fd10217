"""What is found while gradients are added, before a selection asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Segments
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.selection import survey as known
from lightning_safusion.sparsify.selection.survey import Foresight, History, Live, Selector
from tests.looks import note_kernels, note_looks
from tests.sparsify import oracle
from tests.sparsify.oracle import Job

pytestmark = oracle.needs_kernels
SIZES = (40_000, 300, 1, 20_000, 2_000)
NUMEL = sum(SIZES)
EDGES = np.cumsum([0, *SIZES]).tolist()
SCALES = (1, 1, 1, 3, 1, 0.01, 1, 0, 1, 50, 1, 1)


def cut(scope: str, pool: int) -> Segments:
    if scope == "behind":
        return oracle.cut([NUMEL], [700], pool)
    if scope == "across":  # some tensors are cut, some segments have parts of several
        return oracle.cut([10_000, 20_000, 10_150, 9_850, NUMEL - 50_000], [100, 200, 90, 0, 30], pool)
    return oracle.cut(SIZES, [400, 3, 1, 200, 20], pool)


def train(name: str, scope: str, pool: int, foresight: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is selected in each step, of a memory from which it is taken out."""
    torch.manual_seed(0)
    segments, selector = cut(scope, pool), Selector(resolve_sparsifier(name))
    history, parts = History(segments), native.Parts.between(EDGES)
    memory, selected = torch.zeros(NUMEL), []
    for step, scale in enumerate(SCALES):
        grads = [scale * torch.randn(size) * (1 + i) for i, size in enumerate(SIZES)]
        history = history if foresight else History(segments)
        ahead = Foresight(history, EDGES)
        wanted = ahead.wanted()
        assert foresight or wanted is None
        assert (ahead.cut is None) is (scope != "across")
        added = native.add_finite(memory, ahead.cut or parts if foresight else parts, grads, 0.9, wanted)
        with ahead.known(memory, added.found) as survey:
            chosen = selector.select(memory, history, step, survey)
        assert survey.take(memory, segments) == (None, None)
        selected.append((chosen.indices.clone(), chosen.values.clone()))
        native.take_out(memory, chosen.indices, chosen.values)
    return selected


@pytest.mark.parametrize(("scope", "pool", "room"), [("ahead", 0, 16), ("behind", 300, 0), ("across", 300, 16)])
@pytest.mark.parametrize("name", ["topk", "gaussiank", "redsync", "sidco", "dgc"])
def test_no_result_depends_on_it(name: str, scope: str, pool: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_ROOM", room)
    monkeypatch.setattr(known, "_ROOM_NEEDED", 0)
    monkeypatch.setattr(known, "_ROOM_AT_LEAST", 1)
    with_it, without = train(name, scope, pool, True), train(name, scope, pool, False)
    for step, ((indices, values), (expected, numbers)) in enumerate(zip(with_it, without, strict=True)):
        if scope != "ahead" and name == "gaussiank":  # sums of tensors are added to one
            assert abs(len(indices) - len(expected)) <= 2, step
            continue
        assert torch.equal(indices, expected), step
        assert torch.equal(values, numbers), step


@pytest.mark.parametrize("name", ["topk", "gaussiank"])
@pytest.mark.parametrize("scope", ["ahead", "across"])
def test_the_span_is_hardly_ever_read_again(name: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALES", (1,) * 40)
    sizes = note_looks(monkeypatch)
    train(name, scope, 0, False)
    without = sum(sizes)
    sizes.clear()
    train(name, scope, 0, True)
    live = Live.of(cut(scope, 0))
    assert without >= 40 * live.sizes.sum()
    assert sum(sizes) < without / 4


@pytest.mark.parametrize("foresight", [True, False])
@pytest.mark.parametrize("pool", [0, 300])
@pytest.mark.parametrize("scope", ["ahead", "behind"])
def test_gradients_that_grow_need_no_more_room(
    scope: str, pool: int, foresight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "_ROOM", 4)
    monkeypatch.setattr(known, "_ROOM_AT_LEAST", 1)
    rooms: list[int] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("survey", "add"):
            rooms.append(arguments[-2])

    note_kernels(monkeypatch, note)
    segments, sparsifier = cut(scope, pool), resolve_sparsifier("topk")
    job, selector = Job(SIZES, segments), Selector(sparsifier)
    for step, scale in enumerate((1, 1, 1, 100, 1e4, 1e4)):
        torch.manual_seed(step)
        job.memory.zero_()
        found = job.add([scale * torch.randn(size) for size in SIZES])
        with job.ahead.known(job.memory, found if foresight else None) as survey:
            chosen = selector.select(job.memory, job.history, step, survey)
        expected = sparsifier.select(job.memory, cut(scope, pool), step)
        assert torch.equal(chosen.indices, expected.indices)
    assert max(rooms) == Live.of(segments).room < NUMEL / 4


def test_nothing_is_known_where_a_gradient_was_left_out() -> None:
    segments = cut("ahead", 0)
    job, grads = Job(SIZES, segments), [torch.randn(size) for size in SIZES]
    assert job.ahead.wanted() is None
    job.add(grads)
    Selector(resolve_sparsifier("topk")).select(job.memory, job.history, 0)
    grads[3][17] = float("nan")
    added = native.add_finite(job.memory, job.parts, grads, 1.0, job.ahead.wanted())
    assert added.left_out == [3]
    assert added.found is None
    with job.ahead.known(job.memory, added.found) as survey:
        assert survey.take(job.memory, segments)[1] is None
