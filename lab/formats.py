"""Size of messages by layout, and the time to write and to read them.

    $ python -m lab formats
    $ python -m lab formats --values fp32 --densities 0.01

Sizes are those of the tensors of a trace in one buffer, headers and padding included. Times are of random positions in
40 tensors of 50 000 elements, one thread; layouts take turns. "write" is one message, "read" the mean of two messages,
for each entry.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lab.markdown import markdown
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.tools.plan.traces import resolve_trace

TENSORS, ELEMENTS = 40, 50_000
LAYOUTS = ("coo", "bitmap", "eliasfano")


def formats(
    densities: Sequence[float] = (0.1, 0.05, 0.01),
    values: str = "q4",
    trace: str = "bert-base",
    repetitions: int = 31,
) -> None:
    """Size of messages by layout, and the time to write and to read them.

    Args:
        densities: Shares of the elements that are sent.
        values: Value format, such as "q4" or "fp32".
        trace: Name or path of the trace whose tensors give the sizes.
        repetitions: Of each time; the median is shown.

    Raises:
        RuntimeError: If there are no compiled kernels.
    """
    if not native.usable():
        raise RuntimeError("the package was installed without a C compiler: there is nothing to time")
    torch.set_num_threads(1)
    sizes = [tensor.numel for tensor in resolve_trace(trace).tensors]
    rows = []
    for density in densities:
        nbytes = {layout: size(layout, values, sizes, density) for layout in LAYOUTS}
        times = seconds(values, density, repetitions)
        for layout in LAYOUTS:
            entries = sum(quotas(sizes, density))
            bits, ratio = 8 * nbytes[layout] / entries, 4 * sum(sizes) / nbytes[layout]
            each = [f"{1e9 * second / (TENSORS * ELEMENTS * density):.2f}" for second in times[layout]]
            rows.append((f"{density:g}", f"`{layout}-{values}`", f"{bits:.2f}", f"{ratio:.1f}", *each))
    head = ("density", "format", "bits per entry", "fp32 over sent", "write, ns", "read, ns")
    print(markdown(head, rows, 2))


def quotas(sizes: Sequence[int], density: float) -> list[int]:
    """Entries of each tensor."""
    return [max(1, round(numel * density)) for numel in sizes]


def size(layout: str, values: str, sizes: Sequence[int], density: float) -> int:
    """Bytes of a message."""
    edges, entries = [0, *np.cumsum(sizes).tolist()], quotas(sizes, density)
    return resolve_codec(f"{layout}-{values}", edges[-1], sum(entries), torch.float32, edges, entries).nbytes


def seconds(values: str, density: float, repetitions: int) -> dict[str, tuple[float, float]]:
    """Median seconds to write a message, and to read one of two, by layout."""
    generator, numel = np.random.default_rng(0), TENSORS * ELEMENTS
    count = int(numel * density)
    edges = list(range(0, numel + 1, ELEMENTS))
    gradients = [torch.zeros(ELEMENTS) for _ in range(TENSORS)]
    selections = []
    for _ in range(2):
        indices = np.sort(generator.choice(numel, count, replace=False)).astype(np.int32)
        floats = torch.from_numpy(generator.standard_normal(count).astype(np.float32))
        selections.append(Selection(torch.from_numpy(indices), floats, count))
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for layout in LAYOUTS:
        codec = resolve_codec(f"{layout}-{values}", numel, count, torch.float32, edges, [count // TENSORS] * TENSORS)
        memory = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
        for selection, message in zip(selections, memory, strict=True):
            codec.encode(selection, message)
        entries = partial(decoded, codec, memory)
        mean = partial(native.mean_by_pieces, gradients, native.Parts.between(edges), entries, 0.5, numel)
        calls[layout] = partial(codec.outbox(memory[0]), selections[0], False), mean
    taken: dict[str, list[tuple[float, float]]] = {layout: [] for layout in LAYOUTS}
    for _ in range(repetitions):
        for layout, (write, read) in calls.items():
            taken[layout].append((timed(write), timed(read) / 2))
    return {
        layout: (statistics.median(write for write, _ in times), statistics.median(read for _, read in times))
        for layout, times in taken.items()
    }


def decoded(codec: Codec, memory: Tensor, start: int, stop: int) -> native.Together[native.Message]:
    """Messages as compiled kernels read them: as they are where they can."""
    if (inbox := codec.inbox(memory)) is not None:
        return inbox()
    return native.Together([native.Message.decoded(*codec.reader(each)(start, stop)) for each in memory])


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
