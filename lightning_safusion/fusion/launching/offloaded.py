"""Selection on a thread of the host, beside the backward pass (SSFusion, ICDE 2026, section III-C)."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.cost import LinearCost, fit_linear
from lightning_safusion.comm.exchange import TensorFlag
from lightning_safusion.comm.wire.codec import spread
from lightning_safusion.fusion.buffers import Buffer
from lightning_safusion.fusion.gradients import compensate
from lightning_safusion.fusion.lanes import HostCopy, Lane
from lightning_safusion.fusion.launching.planned import Launching
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.plans.selective import choose_offloaded
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Window
from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, span_segments
from lightning_safusion.sparsify.selection.survey import History

# Selection by bytes where nothing may be measured: one core of a host, and a device.
NOMINAL_HOST, NOMINAL_DEVICE = LinearCost(50e-6, 1e-9), LinearCost(100e-6, 5e-12)
# Elements of the spans that are timed, and how often.
_TIMED_ELEMENTS, _TIMED_RUNS = (1 << 12, 1 << 20), 3


class Offloaded(Launching):
    """Selects from tensors on a thread as they become ready.

    Which ones is SSFusion's rule (``choose_offloaded``): the thread takes a tensor whenever it is free, and none that
    would delay the buffer. That decides where a selection is made and not which: it may differ between ranks.

    On CUDA a tensor is copied to pinned memory on a stream of its own, and its buffer is sent when the next one closes,
    so that the hook does not wait for a device that is behind the host. (The paper's release copies to pageable memory
    inside the hook, which stops the backward pass; all its scripts have offloading switched off.)

    ``costs``: seconds of a selection by bytes, in place, and on the thread, copies included.
    """

    asks_always = True

    def __init__(
        self,
        space: GradientSpace,
        planner: Planner,
        dense_first: bool,
        costs: tuple[LinearCost, LinearCost],
    ) -> None:
        super().__init__(space, planner, dense_first)
        self.late_by_one = space.device.type == "cuda"
        self._device, self._host = costs
        self._copies = Lane(space.device)
        self._groups: dict[int, Group] = {}  # of the chosen tensors, by place
        self._selections: dict[int, Future[Selection]] = {}  # by place; of the open window
        self._flags: dict[Group, Tensor] = {}  # uint8 [T] of the tensors that are selected from; of the open window
        self._waiting: Shipment | None = None  # filled, and not sent yet
        self._thread: ThreadPoolExecutor | None = None

    def follow(self, plan: Plan) -> None:
        """Chooses the tensors of a plan."""
        ready = self.planner.costs(self.space.shape).ready
        self._groups = {}
        for group in plan.groups:
            segments = self.space.buffer(group).segments
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

    def closing(self, window: Window, place: int, grad: Tensor, group: Group | None) -> Iterable[Group]:
        """Adds a chosen gradient to the residual and begins to select from it."""
        wanted = place in self._groups and window.groups and window.error is None
        if wanted and window.fresh[place] and not window.bypass[place]:
            try:
                with self.lane.fork():
                    self._select(window, place, grad)
            except Exception as error:
                window.error = error
        return super().closing(window, place, grad, group)

    def _select(self, window: Window, place: int, grad: Tensor) -> None:
        group = self._groups[place]
        buffer, tensor = self.space.buffer(group), place - group.start
        known = self._flags.get(group)
        flags = torch.zeros_like(buffer.all_fresh)
        flags[tensor : tensor + 1] = int(TensorFlag.FRESH)  # a slice: for one element the host would wait for a device
        flags = compensate(buffer, [grad], [tensor], flags, window.scale)
        self._flags[group] = flags if known is None else known | flags
        x = buffer.span[buffer.edges[tensor] : buffer.edges[tensor + 1]]
        part = _part(buffer, tensor)
        if self._thread is None:
            # a new thread is on the first device, and would take memory there
            begin = None if x.is_cpu else partial(torch.cuda.set_device, x.device)
            self._thread = ThreadPoolExecutor(1, "safusion-select", begin)
        if x.is_cpu:
            chosen = self._thread.submit(self.space.selector.select, x, part, window.step)
        else:
            with self._copies.fork():
                copied = HostCopy([x])
            chosen = self._thread.submit(self._on_host, copied, part, window.step)
        self._selections[place] = chosen

    def _on_host(self, copied: HostCopy, part: History, step: int) -> Selection:
        chosen = self.space.selector.select(copied.read()[0], part, step)
        count = int(chosen.count)
        return Selection(chosen.indices[:count].pin_memory(), chosen.values[:count].pin_memory(), count)

    def fill(self, buffer: Buffer, window: Window) -> Shipment | None:
        shipment, group = Shipment(buffer, window), buffer.group
        early = [place - group.start for place in buffer.places if place in self._selections]
        shipment.fill(self.space.selector, early, self._flags.get(group))
        ready, self._waiting = (self._waiting, shipment) if self.late_by_one else (shipment, None)
        return self._collected(ready)

    def last(self) -> Shipment | None:
        ready, self._waiting = self._waiting, None
        return self._collected(ready)

    def _collected(self, shipment: Shipment | None) -> Shipment | None:
        if shipment is not None:
            try:
                self._collect(shipment)
            except Exception as error:
                shipment.flags, shipment.window.error = None, error
        return shipment

    def _collect(self, shipment: Shipment) -> None:
        buffer, device = shipment.buffer, self.space.device
        if self._flags.pop(buffer.group, None) is None or shipment.flags is None:
            return
        parts = [] if shipment.selection is None else [shipment.selection]
        for place in buffer.places:
            if place in self._selections:
                chosen = self._selections.pop(place).result()
                indices = chosen.indices.to(device, non_blocking=True) + buffer.edges[place - buffer.group.start]
                parts.append(Selection(indices, chosen.values.to(device, non_blocking=True), chosen.count))
        shipment.selection = _merged(parts, buffer.stop - buffer.start)

    def ended(self, shipments: Sequence[Shipment]) -> None:
        self.forget()  # what an error has left

    def forget(self) -> None:
        """Waits for the thread and drops its selections."""
        for chosen in self._selections.values():
            chosen.exception()
        self._selections, self._flags, self._waiting = {}, {}, None

    def release(self) -> None:
        """Ends the thread; the next tensor begins another."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None


def _part(buffer: Buffer, tensor: int) -> History:
    cut, one = buffer.segments, slice(tensor, tensor + 1)
    if cut is None:
        raise ValueError(f"nothing is selected from {buffer.group}")
    edges = np.array([0, cut.sizes[tensor]], np.int64)
    return buffer.constant(
        ("part", tensor), lambda: History(Segments(edges, cut.quotas[one], cut.keys[one], cut.shapes[one]))
    )


def _merged(parts: Sequence[Selection], numel: int) -> Selection:
    """Selections of disjoint elements of a span of ``numel`` as one, ascending; padding goes to the end."""
    total = sum(part.count for part in parts)
    keys = []
    for part in parts:
        valid = torch.arange(len(part.indices), device=part.indices.device) < part.count
        keys.append(torch.where(valid, part.indices, numel))
    ascending, order = torch.cat(keys).sort()
    values = torch.cat([part.values for part in parts])[order]
    if isinstance(total, int):
        return Selection(ascending[:total], values[:total], total)
    return Selection(spread(ascending, total), values, total)


def selection_costs(sparsifier: Sparsifier, device: torch.device, measure: bool) -> tuple[LinearCost, LinearCost]:
    """Seconds of a selection in place and on the host, by bytes; gradients live on ``device``.

    ``measure``: this rank may time a copy of the compressor; else numbers are the same in every run.
    """
    on_host = device.type == "cpu"
    if not measure:
        return (NOMINAL_HOST if on_host else NOMINAL_DEVICE), NOMINAL_HOST
    host = _timed(sparsifier, torch.device("cpu"), device)
    return (host if on_host else _timed(sparsifier, device, device)), host


def _timed(sparsifier: Sparsifier, where: torch.device, home: torch.device) -> LinearCost:
    """Through the best times of two sizes; gradients come from, and selections go to, ``home``."""
    sparsifier, samples = copy.deepcopy(sparsifier), []
    for numel in _TIMED_ELEMENTS:
        x = torch.linspace(-1, 1, numel, dtype=torch.float32, device=home)
        segments = span_segments(numel, numel // 100)
        runs = []
        for _ in range(_TIMED_RUNS):
            begin = time.perf_counter()
            chosen = sparsifier.select(x.to(where), segments, 0)
            int(chosen.values.to(home).sum() > 0)  # waits for the device
            runs.append(time.perf_counter() - begin)
        samples.append((4.0 * numel, min(runs)))
    return fit_linear(samples)
