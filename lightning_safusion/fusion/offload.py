"""Selection on a thread of the host, while the backward pass goes on (SSFusion, ICDE 2026, section III-C)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.exchange import TensorFlag
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.compensation import compensate
from lightning_safusion.fusion.lane import Lane
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.selective import choose_offloaded
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Window
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, span_segments
from lightning_safusion.sparsify.selection.survey import History
from lightning_safusion.sparsify.selection.view import device_constant

# Selection by bytes where nothing may be measured: one core of a host, and a device.
NOMINAL_HOST, NOMINAL_DEVICE = LinearCost(50e-6, 1e-9), LinearCost(100e-6, 5e-12)
# Elements of the spans that are timed, and how often.
_TIMED_ELEMENTS, _TIMED_RUNS = (1 << 12, 1 << 20), 3


@dataclass(eq=False)
class _Taken:
    """What the host has of one buffer in the open window.

    Args:
        flags: uint8 [T], what this rank says of the tensors that were taken, 0 for the others; None if there are none.
        selections: By tensor of the buffer.
    """

    flags: Tensor | None = None
    selections: dict[int, Future[Selection]] = field(default_factory=dict)


class Offloader:
    """Takes tensors as they become ready, and selects from them on a thread.

    Which ones is SSFusion's rule (``choose_offloaded``): the thread takes a tensor whenever it is free, and none that
    would hold up the buffer. That decides where a selection is made and not which: it may differ between ranks.

    On CUDA a tensor is copied to pinned memory on a stream of its own, and its buffer leaves when the next one closes,
    so that the hook does not wait for a device that is behind the host. On the CPU it leaves when it closes. (The
    release copies to pageable memory inside the hook, which stops the backward pass; all its scripts have offloading
    switched off.)

    Args:
        space: Makes the buffers.
        device: Seconds of a selection in place, by bytes.
        host: Seconds of one on the thread, copies included.
    """

    def __init__(self, space: GradientSpace, device: LinearCost, host: LinearCost) -> None:
        self.space = space
        self.device = device
        self.host = host
        self.late = space.device.type == "cuda"
        self._copies = Lane(space.device)
        self._plan: Plan | None = None
        self._places: dict[int, Group] = {}
        self._taken: dict[Group, _Taken] = {}
        self._thread: ThreadPoolExecutor | None = None

    def follow(self, plan: Plan, costs: Callable[[], GroupCosts]) -> None:
        """Chooses the tensors of a plan, if it is a new one."""
        if plan is self._plan:
            return
        self._plan, self._places = plan, {}
        ready = costs().ready
        for group in plan.groups:
            segments = self.space.buffer(group).segments
            if segments is None:
                continue
            nbytes = 4 * segments.sizes
            chosen = choose_offloaded(
                ready[group.start : group.stop],
                (segments.quotas > 0).tolist(),
                [self.device(float(n)) for n in nbytes],
                [self.host(float(n)) for n in nbytes],
            )
            self._places |= {group.start + t: group for t in np.flatnonzero(chosen).tolist()}

    def wants(self, place: int) -> bool:
        """Whether the tensor at this place of the plan is one of those chosen."""
        return place in self._places

    def offer(self, window: Window, place: int, grad: Tensor) -> None:
        """Begins to select from a tensor before its buffer is complete, if that is worth while."""
        if not window.groups or window.error is not None or not window.fresh[place] or window.bypass[place]:
            return
        try:
            self._take(window, place, grad)
        except Exception as error:
            window.error = error

    def _take(self, window: Window, place: int, grad: Tensor) -> None:
        """Compensates a fresh tensor and begins to select from it."""
        group = self._places[place]
        buffer, tensor = self.space.buffer(group), place - group.start
        taken = self._taken.setdefault(group, _Taken())
        flags = compensate(buffer, [grad], [place], torch.zeros_like(buffer.all_fresh), window.scale)
        flags |= self._fresh(buffer, tensor)
        taken.flags = flags if taken.flags is None else taken.flags | flags
        x = buffer.span[buffer.edges[tensor] : buffer.edges[tensor + 1]]
        part = self._part(buffer, tensor)
        if self._thread is None:
            self._thread = self._begin_thread()
        if x.device.type == "cpu":
            chosen = self._thread.submit(self.space.selector.select, x, part, window.step)
        else:
            chosen = self._thread.submit(self._on_host, *self._copied(x), part, window.step)
        taken.selections[tensor] = chosen

    def _begin_thread(self) -> ThreadPoolExecutor:
        device = self.space.device
        if device.type == "cpu":
            return ThreadPoolExecutor(1, "safusion-select")
        # a new thread is on the first device, and would take memory there
        return ThreadPoolExecutor(1, "safusion-select", torch.cuda.set_device, (device,))

    def _fresh(self, buffer: Buffer, tensor: int) -> Tensor:
        """uint8 [T]: this tensor is fresh."""
        key = ("fresh", tensor)
        if key not in buffer.constants:
            flags = np.zeros(len(buffer.places), np.uint8)
            flags[tensor] = int(TensorFlag.FRESH)
            buffer.constants[key] = device_constant(flags, self.space.device)
        constant: Tensor = buffer.constants[key]
        return constant

    def _part(self, buffer: Buffer, tensor: int) -> History:
        """One tensor of a buffer as a span of its own."""
        key = ("part", tensor)
        if key not in buffer.constants:
            whole = buffer.segments
            if whole is None:
                raise ValueError(f"nothing is selected from {buffer.group}")
            edges = np.array([0, whole.sizes[tensor]], np.int64)
            quotas, one = whole.quotas[tensor : tensor + 1], slice(tensor, tensor + 1)
            buffer.constants[key] = History(Segments(edges, quotas, whole.keys[one], whole.shapes[one]))
        part: History = buffer.constants[key]
        return part

    def _copied(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """A copy in pinned memory, and when it is complete."""
        with self._copies.fork():
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            host.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return host, event

    def _on_host(self, x: Tensor, copied: torch.cuda.Event, part: History, step: int) -> Selection:
        copied.synchronize()  # of this thread only: the hook has long returned
        chosen = self.space.selector.select(x, part, step)
        count = int(chosen.count)
        return Selection(chosen.indices[:count].pin_memory(), chosen.values[:count].pin_memory(), count)

    def taken(self, group: Group) -> tuple[Sequence[int], Tensor | None]:
        """Tensors of a buffer that the host has in this window, and uint8 [T] what to say of them."""
        taken = self._taken.get(group)
        return ((), None) if taken is None else (list(taken.selections), taken.flags)

    def collect(self, shipment: Shipment) -> None:
        """Waits for the selections from a shipment's tensors and adds them to its own.

        Raises:
            Exception: What a selection has raised.
        """
        taken = self._taken.pop(shipment.buffer.group, None)
        if taken is None:
            return
        edges, device = shipment.buffer.edges, self.space.device
        parts = [] if shipment.selection is None else [shipment.selection]
        for tensor, future in taken.selections.items():
            chosen = future.result()
            indices = chosen.indices.to(device, non_blocking=True) + edges[tensor]
            parts.append(Selection(indices, chosen.values.to(device, non_blocking=True), chosen.count))
        shipment.selection = _merged(parts, shipment.buffer.stop - shipment.buffer.start)

    def forget(self) -> None:
        """Waits for the thread and forgets what it has selected."""
        taken, self._taken = self._taken, {}
        for each in taken.values():
            for future in each.selections.values():
                future.exception()

    def release(self) -> None:
        """Ends the thread; the next tensor begins another."""
        self.forget()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


def _merged(parts: Sequence[Selection], numel: int) -> Selection:
    """Selections of disjoint elements as one, ascending; padding goes to the end.

    Args:
        parts: The selections, positions in the span.
        numel: Elements of the span (N).
    """
    counts = [part.count for part in parts]
    total = sum(counts)
    keys = []
    for part in parts:
        valid = torch.arange(len(part.indices), device=part.indices.device) < part.count
        keys.append(torch.where(valid, part.indices, numel))
    ascending, order = torch.cat(keys).sort()
    values = torch.cat([part.values for part in parts])[order]
    if isinstance(total, int):
        return Selection(ascending[:total], values[:total], total)
    return Selection(ascending.clamp(max=numel - 1), values, total)


def selection_costs(sparsifier: Sparsifier, device: torch.device, measure: bool) -> tuple[LinearCost, LinearCost]:
    """Seconds of a selection in place and on the host, by bytes.

    Args:
        sparsifier: Is timed, a copy of it.
        device: Where gradients live.
        measure: Whether this rank may time it; else numbers that are the same in every run.
    """
    cpu = torch.device("cpu")
    if not measure:
        return (NOMINAL_HOST if device.type == "cpu" else NOMINAL_DEVICE), NOMINAL_HOST
    host = _timed(sparsifier, cpu, device)
    return (host if device.type == "cpu" else _timed(sparsifier, device, device)), host


def _timed(sparsifier: Sparsifier, where: torch.device, home: torch.device) -> LinearCost:
    """Through the best times of two sizes; gradients come from, and selections go to, ``home``."""
    sparsifier = copy.deepcopy(sparsifier)
    seconds = []
    for numel in _TIMED_ELEMENTS:
        x = torch.linspace(-1, 1, numel, device=home)
        segments = span_segments(numel, numel // 100)
        runs = []
        for _ in range(_TIMED_RUNS):
            begin = time.perf_counter()
            chosen = sparsifier.select(x.to(where), segments, 0)
            int(chosen.values.to(home).sum() > 0)  # waits for the device
            runs.append(time.perf_counter() - begin)
        seconds.append(min(runs))
    ((small, large),) = pairwise(4 * numel for numel in _TIMED_ELEMENTS)
    slope = max(0.0, (seconds[1] - seconds[0]) / (large - small))
    return LinearCost(max(0.0, seconds[0] - slope * small), slope)
