"""Times of kernels and of whole windows, each against a copy of the same bytes in the same run."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lab.gpu.buffers import DECAY, Case, Rank
from lab.gpu.costs import counted, factors, speeds
from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.jobs import BUFFERS, DENSITY, SETS, SETTLED, Echo, Job, described, drawn_sets, overlap, shapes_of
from lab.gpu.stages import Setting
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.kernels.cuda import launch
from lightning_safusion.kernels.cuda.buffer import Weighing
from lightning_safusion.kernels.cuda.window import WindowKernels
from lightning_safusion.tools.plan.work import Work

#: Workers whose messages are decoded, and most milliseconds of a window of BERT-base with its instructions counted.
WORKERS = {2: 2.6, 8: 3.4, 32: 6.0}
#: Most times as long as its bytes at the rate of a copy, or its instructions, that a kernel takes.
FACTOR = 1.67
#: Most that two timed windows have in common: the next window of a training has other largest elements.
OVERLAP = 0.5
#: Other sizes of blocks that may be faster on a device, and the kernels that have them.
VARIANTS = (
    ("ADDED", (256, 1024), ("compensate",)),
    ("BLOCK", (512, 2048), ("collect",)),
    ("BITS", (128, 512), ("decode", "commit")),
)
#: Beginnings of the names of operations that start nothing on a device, though they are no views.
FREE = ("empty", "is_", "reshape", "record_stream", "local_scalar")


@dataclass
class Stopwatch:
    """Takes the place of a launch, and notes when each kernel began and ended."""

    place: Device
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._launch = launch.launch

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        begin = self.place.moment()
        self._launch(kernel, programs, *arguments, **constants)
        self.spans.append((kernel.fn.__name__, begin, self.place.moment()))

    def seconds(self) -> dict[str, float]:
        """By kernel, of all its launches; waits for them."""
        found: dict[str, float] = defaultdict(float)
        for name, begin, end in self.spans:
            found[name] += self.place.seconds(begin, end)
        return dict(found)


class Started(TorchDispatchMode):
    """Counts what a device is given, by name: operations of PyTorch, and launches of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._launch, self._patch = launch.launch, patch.object(launch, "launch", self.launch)

    @property
    def number(self) -> int:
        """Of all."""
        return sum(self.names.values())

    def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Takes the place of a launch."""
        self.names[kernel.fn.__name__] += programs > 0
        with _disable_current_modes():  # the interpreter has operations of its own
            self._launch(kernel, programs, *arguments, **constants)

    def __enter__(self) -> Started:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        self._patch.stop()
        super().__exit__(*ended)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        if not func.is_view and not name.startswith(FREE):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Buffers:
    """The kernels of all buffers of a model, on one stream; every worker sends what this one sends.

    Args:
        place: Where they run.
        sizes: Of the tensors of each buffer.
        world_size: Workers.
        by_update: Elements are compared by how far the optimizer would move them.
    """

    def __init__(self, place: Device, sizes: Sequence[Sequence[int]], world_size: int, by_update: bool) -> None:
        self.place = place
        self.ranks = [self._rank(tuple(own), world_size, by_update) for own in sizes]
        self._weighings: list[Weighing | None] = [rank.weighing for rank in self.ranks]
        self._window = WindowKernels(place.device)
        self._sets = [drawn_sets(rank.case.sizes, place.device) for rank in self.ranks]
        self._refreshed = 0
        for _ in range(SETS if place.cuda else 1):  # compiles, and fills the residual
            self.refresh()
            self.window()

    def _rank(self, sizes: tuple[int, ...], world_size: int, by_update: bool) -> Rank:
        generator = torch.Generator(self.place.device).manual_seed(3)
        total = sum(sizes)
        memory, flat = (torch.randn(total, device=self.place.device, generator=generator) for _ in range(2))
        moments: list[Tensor | None] | None = None
        if by_update:
            drawn = torch.rand(total, device=self.place.device, generator=generator).mul_(1e-3)
            moments = [part.clone() for part in drawn.split(sizes)]
        grads = [part.clone() for part in flat.split(sizes)]
        return Rank.holding(Case(sizes, density=DENSITY, world_size=world_size), 0, memory, grads, moments)

    @property
    def numel(self) -> int:
        """Elements of all buffers."""
        return sum(len(rank.memory) for rank in self.ranks)

    @property
    def grads(self) -> list[Tensor]:
        """Of all buffers."""
        return [grad for rank in self.ranks for grad in rank.grads]

    def refresh(self) -> None:
        """Other gradients than in the last windows."""
        for rank, sets in zip(self.ranks, self._sets, strict=True):
            torch._foreach_copy_(rank.grads, sets[self._refreshed % SETS])
        self._refreshed += 1

    def window(self) -> None:
        """From gradients to messages, which all workers send, and from these to means."""
        for rank, weighing in zip(self.ranks, self._weighings, strict=True):
            rank.kernels.locate(rank.grads, weighing)
            rank.kernels.select(DECAY, weighing)
            rank.kernels.pack(0)
            messages = rank.kernels.received.view(rank.case.world_size, -1)
            messages.copy_(rank.kernels.sent.expand_as(messages))
        for rank in self.ranks:
            rank.kernels.decode(DECAY, self._window.status)
        self._window.commit([rank.kernels for rank in self.ranks])

    def timed(self, repetitions: int) -> dict[str, float]:
        """Median seconds of each kernel in a window, all its launches together."""
        every: list[dict[str, float]] = []
        for _ in range(repetitions):
            self.refresh()
            self.place.hold()
            watch = Stopwatch(self.place)
            with patch.object(launch, "launch", watch):
                self.window()
            every.append(watch.seconds())
        return {name: statistics.median(seconds[name] for seconds in every) for name in every[0]}

    def host_seconds(self) -> float:
        """Of the host for each launch, while the device is busy with other work."""
        watch = Stopwatch(self.place)
        with patch.object(launch, "launch", watch):
            self.window()
        self.place.wait()
        self.place.hold()
        begin = perf_counter()
        self.window()
        return (perf_counter() - begin) / len(watch.spans)


def workers_of(setting: Setting) -> dict[int, float]:
    """Numbers of workers and their budgets; in a rehearsal without the largest, which the interpreter would decode."""
    return {number: budget for number, budget in WORKERS.items() if number < 32 or not setting.rehearse}


def cut(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Tensors in so many buffers of about the same number of tensors."""
    edges = np.linspace(0, len(sizes), number + 1).astype(int).tolist()
    return [list(sizes[start:stop]) for start, stop in pairwise(edges)]


def passes(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``; writes the file of costs."""
    place, repetitions = Device(setting.rehearse), 1 if setting.rehearse else 15
    sizes = cut([math.prod(shape) for shape in shapes_of(setting.rehearse)], BUFFERS)
    speed = speeds(place, place.copy_rate(sum(map(sum, sizes))))
    yield note("bandwidth of a copy", speed.memory / 1e9, "GB/s", "read and written; of as many float32 numbers")
    yield note("between short kernels", speed.launch * 1e6, "µs")
    yield note("instructions", speed.instructions / 1e12, "10¹² per second", "by the clock of the device")
    yield note("from the host", speed.pcie / 1e9, "GB/s")
    few = min(WORKERS)
    for world_size, budget in workers_of(setting).items():
        buffers, work = Buffers(place, sizes, world_size, True), counted(sizes, world_size)
        seconds = buffers.timed(repetitions)
        found = factors(speed, seconds, work)
        for name in seconds:
            if name not in found:  # its bytes and instructions are not counted
                yield note(f"{name}, {world_size} workers", seconds[name] * 1e3, "ms")
            elif world_size == few or name == "decode":
                yield _kernel(name, world_size, seconds[name], found[name], work[name], buffers.numel)
        yield Figure(f"sum of the kernels, {world_size} workers", sum(seconds.values()) * 1e3, "ms", most=budget)
        whole = place.median(buffers.window, repetitions, buffers.refresh)
        yield Figure(f"a window on one stream, {world_size} workers", whole * 1e3, "ms", most=budget)
        if world_size == few:
            replace(speed, factors=found).save(setting.folder / "device-costs.json")
            yield note("file of costs", "device-costs.json")
            yield _selections("the kernels", buffers.grads, buffers.refresh, buffers.window)
            yield note("host, for each launch", buffers.host_seconds() * 1e6, "µs", "look-ups of a window included")
            yield from _variants(buffers, seconds, repetitions)
        del buffers


def _kernel(name: str, world_size: int, seconds: float, factor: float, work: Work, numel: int) -> Figure:
    """Of all its launches in a window."""
    by = f", {world_size} workers" * (name == "decode")
    about = f"{seconds * 1e3:.3f} ms; {work.nbytes / numel:.2f} bytes, {work.instructions / numel:.0f} instructions"
    about += " per element"
    return Figure(f"{name}{by}: over max(bytes, instructions)", factor, "times", most=FACTOR, note=about)


def _selections(
    what: str, grads: Sequence[Tensor], refresh: Callable[[], object], window: Callable[[], object]
) -> Figure:
    """What two windows that follow each other select is not the same: their times are those of a training."""
    found = []
    for _ in range(2):
        refresh()
        window()
        found.append([grad.clone() for grad in grads])
    return Figure(f"{what}: overlap of two windows' selections", overlap(*found), most=OVERLAP, kind="counted")


def _variants(buffers: Buffers, seconds: Mapping[str, float], repetitions: int) -> Iterator[Figure]:
    """Times of kernels with other blocks over those with their own."""
    for option, values, kernels in VARIANTS:
        own = getattr(launch, option)
        for value in values:
            with patch.object(launch, option, value):
                buffers.window()  # compiles
                other = buffers.timed(repetitions)
            for name in kernels:
                yield note(f"{name}: {option} = {value} over {own}", other[name] / seconds[name], "times as long")


def windows(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place, repetitions = Device(setting.rehearse), 2 if setting.rehearse else 36
    specs = described(shapes_of(setting.rehearse))
    for world_size, budget in workers_of(setting).items():
        by, before = f"{world_size} workers", place.allocated()
        job = Job(place, specs, Echo(world_size))
        job.warm()
        yield from _memory(place, job, before, by)
        job.settle(2 if setting.rehearse else SETTLED)
        yield from _times(place, job, repetitions, by, budget)
        if world_size == min(WORKERS):
            yield _selections("the engine", job.grads, job.refresh, job.window)
        with Started() as started:
            job.window()
        number = len(_events(job).buffers)
        about = ", ".join(f"{count} {name}" for name, count in started.names.items())
        yield Figure(f"launches, {by}", started.number, most=13 * number + 2, kind="counted", note=about)
        del job


def _events(job: Job) -> WindowEvents:
    assert job.engine.record is not None
    return job.engine.record.events


def _memory(place: Device, job: Job, before: int, by: str) -> Iterator[Figure]:
    """Bytes that stay, and those that a window needs besides."""
    place.wait()
    assert job.engine.record is not None
    messages = (1 + job.engine.transport.world_size) * job.engine.record.bytes_sent
    inputs = 8 * job.numel  # gradients and second moments
    kept = (place.allocated() - before - inputs - messages) / job.numel if place.cuda else 0.0
    yield Figure(f"persistent memory, {by}", kept, "bytes per element", most=9.0, note="and messages")
    largest = max(buffer.elements for buffer in _events(job).buffers)
    temporary = place.peak(job.window) / largest
    yield Figure(f"temporaries, {by}", temporary, "bytes per element of the largest buffer", most=2.0)


@dataclass
class Spent:
    """Seconds of windows: of the device, of the host for each tensor in the hook, and of the host at the end."""

    device: list[float] = field(default_factory=list)
    hook: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


def spent(place: Device, job: Job, windows: int) -> tuple[Spent, Spent]:
    """Of usual windows, and of those in 16 that record when everything happened; the host is ahead of the device."""
    usual, recorded = Spent(), Spent()
    for _ in range(windows):
        job.refresh()
        place.wait()
        place.hold()
        begin, first = place.moment(), perf_counter()
        job.push()
        middle = perf_counter()
        job.engine.drain()
        last, end = perf_counter(), place.moment()
        assert job.engine.record is not None
        each = recorded if job.engine.record.surveyed else usual
        each.device.append(place.seconds(begin, end))
        each.hook.append((middle - first) / len(job.specs))
        each.end.append(last - middle)
    return usual, recorded


def _times(place: Device, job: Job, windows: int, by: str, budget: float) -> Iterator[Figure]:
    usual, recorded = spent(place, job, windows)
    seconds, hook = statistics.median(usual.device), statistics.median(usual.hook)
    yield Figure(f"a window of the engine, {by}", seconds * 1e3, "ms", most=budget)
    yield Figure(f"host in the hook, {by}", hook * 1e6, "µs per tensor", most=10.0, note="launches included")
    yield note(f"host at the end of a window, {by}", statistics.median(usual.end) * 1e6, "µs")
    about = "one in 16, and the first 64"
    yield note(f"a window that records everything, {by}", statistics.median(recorded.device) * 1e3, "ms", about)
    hook = statistics.median(recorded.hook)
    yield note(f"host in the hook of a window that records everything, {by}", hook * 1e6, "µs per tensor")
