"""What the host makes to select on a device, where PyTorch's operations do it: nothing of the length of a buffer."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from weakref import ref

import pytest
import torch
from torch import Tensor

from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.sparsify import TopK
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.survey import Selector, SpanSurvey
from tests.cluster import specs
from tests.fusion.windows import engine_on, windows

SHAPES = ((400_000,), (1,), (700, 700), (300,), (90_000,), (1,))
LITTLE = 1 << 19  # bytes; half a byte for each element


def made(work: Callable[[], object]) -> int:
    """Most bytes of host memory that Python and NumPy had at a time for it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def pooled_engine(device: torch.device, dense: tuple[int, ...] = ()) -> Engine:
    parts = {"fusion": "single", "quota": "pooled", "density": 0.01}
    engine = engine_on(device, tensors=specs(SHAPES, dense=dense), **parts)
    windows(engine, 3)
    return engine


def largest(engine: Engine) -> Buffer:
    return max(engine.space.buffers.values(), key=lambda buffer: len(buffer.places))


@pytest.mark.parametrize("dense", [(), (0, 3)])
def test_a_window_with_tensors_of_which_nothing_is_selected(device: torch.device, dense: tuple[int, ...]) -> None:
    engine = pooled_engine(device, dense)
    segments = largest(engine).segments
    assert segments.pool > 0
    assert (segments.quotas == 0).sum() >= 2  # the tensors of one element, and the dense ones
    assert made(lambda: windows(engine, 1)) < LITTLE


def test_a_selection_without_absent_tensors(device: torch.device) -> None:
    buffer, selector = largest(pooled_engine(device)), Selector(TopK())
    buffer.select(selector, 1, [3], ())  # what fake tensors keep of operations that they see first
    # What is loaded at a first use counts once; what has a buffer's length would count each time.
    assert min(made(partial(buffer.select, selector, 1, absent, ())) for absent in ([1], [0, 4], [2])) < LITTLE


def test_cuts_without_absent_tensors_are_made_once_and_not_kept_for_ever() -> None:
    engine = pooled_engine(torch.device("cpu"))
    buffer, cuts = largest(engine), []

    class Noting(TopK):
        def select(self, x: Tensor, segments: Segments, step: int, survey: SpanSurvey | None = None) -> Selection:
            cuts.append(ref(segments))
            return super().select(x, segments, step, survey)

    selector = Selector(Noting())
    for absent in ([1], [0, 4], [4, 0], [1]):  # two optimizers that take turns
        buffer.select(selector, 1, absent, ())
    assert cuts[0]() is not None
    assert cuts[0]() is cuts[3]()
    assert cuts[1]() is cuts[2]()
    for absent in ([2], [3], [0]):
        buffer.select(selector, 1, absent, ())
    gc.collect()
    assert cuts[0]() is None
