"""Time of selection before fusion against selection after it, over the gradients of a model.

The gradients are cut into buffers of a few tensors in the order in which they become ready. Selection before fusion has
one segment per tensor, selection after it one segment per buffer of the same capacity; a plain copy of the buffers is
the unit. All three are timed in one run, in turns, so that a change of clock or cache hits all alike. The models are
BERT-base and BERT-large, where reading the elements is the cost, and a chain of small layers, where the calls are.

    $ python -m lab selection --sparsifiers topk,gaussiank --density 0.01
    $ python -m lab selection --model bert-large
    $ python -m lab selection --model small --per-buffer 32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from lab.markdown import line, markdown
from lightning_safusion.lookup import look_up
from lightning_safusion.sparsify import History, Segments, Sparsifier, resolve_sparsifier
from lightning_safusion.sparsify.selection.survey import Selector
from lightning_safusion.tools.plan.traces import resolve_trace


def bert_base_shapes() -> list[tuple[int, ...]]:
    """Shapes of BERT-base's 199 parameters, pooler included; backward visits the last ones first."""
    hidden, feed_forward = 768, 3072
    embeddings: list[tuple[int, ...]] = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    square: list[tuple[int, ...]] = [(hidden, hidden), (hidden,)]
    attention = 4 * square + [(hidden,), (hidden,)]
    dense = [(feed_forward, hidden), (feed_forward,), (hidden, feed_forward), (hidden,), (hidden,), (hidden,)]
    return (embeddings + 12 * (attention + dense) + square)[::-1]


def bert_large_shapes() -> list[tuple[int, ...]]:
    """Shapes of BERT-large's 393 parameters, those of its heads included."""
    return [tensor.shape for tensor in resolve_trace("bert-large").tensors]


def small_shapes() -> list[tuple[int, ...]]:
    """Shapes of 250 linear layers of 32 features, as in ``python -m lab hook``."""
    return 250 * [(32,), (32, 32)]


def per_tensor(sparsifier: Sparsifier, shapes: Sequence[tuple[int, ...]], density: float, first: int = 0) -> Segments:
    """One segment per tensor, of a buffer that begins with the tensor ``first``."""
    sizes = [math.prod(shape) for shape in shapes]
    quotas = [sparsifier.quota(size, shape, density) for size, shape in zip(sizes, shapes, strict=True)]
    return Segments(np.cumsum([0, *sizes]), np.array(quotas), tuple(range(first, first + len(shapes))), tuple(shapes))


def fused(cut: Segments) -> Segments:
    """One segment over the same tensors, with the same room."""
    quota = np.array([min(cut.capacity, cut.numel)])
    return Segments(cut.edges[[0, -1]], quota, (cut.keys,), ((cut.numel,),))


def selection_times(
    sparsifier: Sparsifier, spans: Sequence[Tensor], cuts: Sequence[Segments], repetitions: int
) -> tuple[float, ...]:
    """Seconds to select from all spans before and after fusion, and to copy them: sums of the medians of each span."""
    targets, selector = [torch.empty_like(span) for span in spans], Selector(sparsifier)
    before, after = [History(cut) for cut in cuts], [History(fused(cut)) for cut in cuts]

    variants: tuple[Callable[[int, int], object], ...] = (
        lambda place, step: selector.select(spans[place], before[place], step),
        lambda place, step: selector.select(spans[place], after[place], step),
        lambda place, step: targets[place].copy_(spans[place]),
    )
    times = np.empty((len(variants), len(spans), repetitions + 1))
    for repetition in range(repetitions + 1):
        for place, span in enumerate(spans):
            # a later variant may find the span in the cache: take turns
            first = (place + repetition) % len(variants)
            for variant in (*range(first, len(variants)), *range(first)):
                begin = perf_counter()
                variants[variant](place, repetition)
                if span.is_cuda:
                    torch.cuda.synchronize()
                times[variant, place, repetition] = perf_counter() - begin
    # the first round warms up
    return tuple(np.median(times[:, :, 1:], axis=2).sum(axis=1).tolist())


MODELS = {"bert-base": bert_base_shapes, "bert-large": bert_large_shapes, "small": small_shapes}


def selection(
    sparsifiers: Sequence[str] = ("topk", "gaussiank"),
    density: float = 0.01,
    model: str = "bert-base",
    per_buffer: int = 8,
    repetitions: int = 7,
    device: str = "cpu",
    threads: int = 1,
) -> None:
    """Time of selection before fusion against selection after it, over the gradients of a model.

    Args:
        sparsifiers: Their names.
        density: Share of the elements.
        model: "bert-base", "bert-large" or "small".
        per_buffer: Tensors in each buffer.
        repetitions: Runs of which the median is taken.
        device: Of the gradients.
        threads: Of torch on the CPU.
    """
    torch.set_num_threads(threads)
    shapes = look_up("model", model, MODELS)()
    firsts = range(0, len(shapes), per_buffer)
    groups = [shapes[first : first + per_buffer] for first in firsts]
    generator = torch.Generator().manual_seed(0)
    spans = [torch.randn(sum(map(math.prod, group)), generator=generator).to(device) for group in groups]
    print(f"{len(shapes)} tensors in {len(groups)} buffers, density {density}, {device}\n")
    print(markdown(("sparsifier", "before, ms", "after, ms", "ratio", "copies", "us per tensor"), ()))
    for name in sparsifiers:
        sparsifier = resolve_sparsifier(name)
        # tensors keep their keys, which thresholds of the steps before are kept under
        cuts = [per_tensor(sparsifier, group, density, first) for group, first in zip(groups, firsts, strict=True)]
        before, after, copy = selection_times(sparsifier, spans, cuts, repetitions)
        times = f"{before * 1e3:.2f}", f"{after * 1e3:.2f}", f"{before / after:.3f}", f"{before / copy:.2f}"
        print(line((name, *times, f"{before / len(shapes) * 1e6:.2f}")), flush=True)
