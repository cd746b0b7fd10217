"""Selection on a thread of the host, while the backward pass goes on (SSFusion, ICDE 2026, section III-C)."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.exchange import TensorFlag
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.device_drain import Lane
from lightning_safusion.fusion.gradients import compensate
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


class Offloader:
    """Selects from tensors on a thread as they become ready.

    Which ones is SSFusion's rule (``choose_offloaded``): the thread takes a tensor whenever it is free, and none that
    would delay the buffer. That decides where a selection is made and not which: it may differ between ranks.

    On CUDA a tensor is copied to pinned memory on a stream of its own, and its buffer is sent when the next one closes,
    so that the hook does not wait for a device that is behind the host. On the CPU it is sent when it closes. (The
    release copies to pageable memory inside the hook, which stops the backward pass; all its scripts have offloading
    switched off.)

    Args:
        space: Makes the buffers.
        device: Seconds of a selection in place, by bytes.
        host: Seconds of one on the thread, copies included.

    Attributes:
        late: Buffers are sent when the next one closes.
    """

    def __init__(self, space: GradientSpace, device: LinearCost, host: LinearCost) -> None:
        self.late = space.device.type == "cuda"
        self._space = space
        self._device = device
        self._host = host
        self._copies = Lane(space.device)
        self._groups: dict[int, Group] = {}  # of the chosen tensors, by place
        self._selections: dict[int, Future[Selection]] = {}  # by place; of the open window
        self._flags: dict[Group, Tensor] = {}  # uint8 [T] of the tensors that are selected from; of the open window
        self._filled: list[Shipment] = []  # not sent yet
        self._thread: ThreadPoolExecutor | None = None

    def follow(self, plan: Plan, ready: Sequence[float]) -> None:
        """Chooses the tensors of a plan.

        Args:
            plan: The plan of the next windows.
            ready: When each gradient is ready [L], seconds.
        """
        self._groups = {}
        for group in plan.groups:
            segments = self._space.buffer(group).segments
            if segments is None:
                continue
            nbytes = (4.0 * segments.sizes).tolist()
            chosen = choose_offloaded(
                ready[group.start : group.stop],
                (segments.quotas > 0).tolist(),
                list(map(self._device, nbytes)),
                list(map(self._host, nbytes)),
            )
            self._groups |= {group.start + t: group for t in np.flatnonzero(chosen).tolist()}

    def wants(self, place: int) -> bool:
        """Whether the tensor at this place of the plan is one of those chosen."""
        return place in self._groups

    def offer(self, window: Window, place: int, grad: Tensor) -> None:
        """Adds a gradient to the residual and begins to select from it, unless it is stale or bypasses the residual."""
        if not window.groups or window.error is not None or not window.fresh[place] or window.bypass[place]:
            return
        try:
            self._begin(window, place, grad)
        except Exception as error:
            window.error = error

    def _begin(self, window: Window, place: int, grad: Tensor) -> None:
        group = self._groups[place]
        buffer, tensor = self._space.buffer(group), place - group.start
        known = self._flags.get(group)
        flags = compensate(buffer, [grad], [place], torch.zeros_like(buffer.all_fresh), window.scale)
        flags |= _fresh(buffer, tensor)
        self._flags[group] = flags if known is None else known | flags
        x = buffer.span[buffer.edges[tensor] : buffer.edges[tensor + 1]]
        part = _part(buffer, tensor)
        if self._thread is None:
            # a new thread is on the first device, and would take memory there
            begin = (lambda: None) if x.is_cpu else partial(torch.cuda.set_device, x.device)
            self._thread = ThreadPoolExecutor(1, "safusion-select", begin)
        if x.is_cpu:
            chosen = self._thread.submit(self._space.selector.select, x, part, window.step)
        else:
            chosen = self._thread.submit(self._on_host, *self._copied(x), part, window.step)
        self._selections[place] = chosen

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
        chosen = self._space.selector.select(x, part, step)
        count = int(chosen.count)
        return Selection(chosen.indices[:count].pin_memory(), chosen.values[:count].pin_memory(), count)

    def fill(self, shipment: Shipment) -> list[Shipment]:
        """Fills a shipment; returns those that are to be sent now, with all of their selections."""
        group = shipment.buffer.group
        early = [place - group.start for place in shipment.buffer.places if place in self._selections]
        shipment.fill(self._space.selector, early, self._flags.get(group))
        self._filled.append(shipment)
        return self._collected(keep=int(self.late))

    def rest(self) -> list[Shipment]:
        """Those that have not been sent yet, once every tensor has been submitted."""
        return self._collected(keep=0)

    def _collected(self, keep: int) -> list[Shipment]:
        ready = self._filled[: len(self._filled) - keep]
        del self._filled[: len(ready)]
        for shipment in ready:
            try:
                self._collect(shipment)
            except Exception as error:
                shipment.flags, shipment.window.error = None, error
        return ready

    def _collect(self, shipment: Shipment) -> None:
        """Waits for the selections from a shipment's tensors and adds them to its own."""
        buffer, device = shipment.buffer, self._space.device
        if self._flags.pop(buffer.group, None) is None or shipment.flags is None:
            return
        parts = [] if shipment.selection is None else [shipment.selection]
        for place in buffer.places:
            if place in self._selections:
                chosen = self._selections.pop(place).result()
                indices = chosen.indices.to(device, non_blocking=True) + buffer.edges[place - buffer.group.start]
                parts.append(Selection(indices, chosen.values.to(device, non_blocking=True), chosen.count))
        shipment.selection = _merged(parts, buffer.stop - buffer.start)

    def forget(self) -> None:
        """Waits for the thread and forgets what it has selected."""
        for chosen in self._selections.values():
            chosen.exception()
        self._selections, self._flags, self._filled = {}, {}, []

    def release(self) -> None:
        """Ends the thread; the next tensor begins another."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None


def _fresh(buffer: Buffer, tensor: int) -> Tensor:
    """uint8 [T]: this tensor is fresh."""

    def make() -> Tensor:
        flags = np.zeros(len(buffer.places), np.uint8)
        flags[tensor] = int(TensorFlag.FRESH)
        return device_constant(flags, buffer.device)

    return buffer.constant(("fresh", tensor), make)


def _part(buffer: Buffer, tensor: int) -> History:
    """One tensor of a buffer as a span of its own."""
    cut, one = buffer.segments, slice(tensor, tensor + 1)
    if cut is None:
        raise ValueError(f"nothing is selected from {buffer.group}")
    edges = np.array([0, cut.sizes[tensor]], np.int64)
    return buffer.constant(
        ("part", tensor), lambda: History(Segments(edges, cut.quotas[one], cut.keys[one], cut.shapes[one]))
    )


def _merged(parts: Sequence[Selection], numel: int) -> Selection:
    """Selections of disjoint elements as one, ascending; padding goes to the end.

    Args:
        parts: The selections, positions in the span.
        numel: Elements of the span (N).
    """
    total = sum(part.count for part in parts)
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
    on_host = device.type == "cpu"
    if not measure:
        return (NOMINAL_HOST if on_host else NOMINAL_DEVICE), NOMINAL_HOST
    host = _timed(sparsifier, torch.device("cpu"), device)
    return (host if on_host else _timed(sparsifier, device, device)), host


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
    small, large = (4 * numel for numel in _TIMED_ELEMENTS)
    slope = max(0.0, (seconds[1] - seconds[0]) / (large - small))
    return LinearCost(max(0.0, seconds[0] - slope * small), slope)
