"""The engine: gradients are pushed, full buffers launched, and at the end of a window drained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from torch import Tensor

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport.interface import during
from lightning_safusion.fusion.device_drain import DeviceDrain
from lightning_safusion.fusion.drain import Drain, OverflowGuard
from lightning_safusion.fusion.events import Observer, WindowEvents, clock_for
from lightning_safusion.fusion.fused import FusedPath
from lightning_safusion.fusion.lanes import Lane
from lightning_safusion.fusion.offload import Offloader
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.fusion.shares import LargestCounts
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.ticks import Ticks
from lightning_safusion.fusion.undecided import Undecided
from lightning_safusion.fusion.window import Window
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule, Opening

# The end of a collective is recorded by a callback on the backend's thread, which stops the backward's for the
# interpreter's lock: in every window at first, then in one of 16 and whenever the planner needs it.
_TIMED_WINDOWS, _TIMED_EVERY = 64, 16
# Windows after one with a gradient that is not finite in which the next such window is expected.
_WARY_WINDOWS = 100
# Until the order of the gradients is known everything is sent at the end, in pieces that bound the memory of a buffer.
_UNPLANNED_ELEMENTS = 1 << 25


class Engine:
    """Runs backward windows: :meth:`push` every gradient, then :meth:`drain`.

    The gradient that completes a buffer makes a :class:`Shipment`: the gradients are added to the residual and elements
    are selected from the sum (``fill``), written (``pack``) and sent (``launch``). :meth:`drain` waits for the messages
    of all ranks, writes the means into the gradients (``decode``) and takes what was sent out of the residual
    (``commit``).

    Every rank must push the same tensors in the same order (DDP's bucket order does), which makes every decision here
    the same on all ranks: nothing depends on a local count or clock.

    Args:
        space: Order, quotas, residual and buffers of the tensors.
        planner: Says which tensors share a buffer.
        density: Density by step and epoch.
        dense_first: Average the first window as DDP does, before costs are known; else what no plan covers is sparse.
        overlap: Launch buffers while gradients still arrive. Not where a tensor is submitted at different points of the
            backward pass on different ranks (unused on some): the collectives of the model's own backward
            (SyncBatchNorm) would meet ours in different orders.
        deferred: Read the flags of all ranks one window late (:class:`DeviceDrain`), so that the host never waits for
            the device. Only where every tensor gets a gradient on all ranks in every window.
        offload: Selects from some tensors on a thread of the host.
        ticks: Agreement on the tensors that are ready; only timer-driven fusion has it.
    """

    def __init__(
        self,
        space: GradientSpace,
        planner: Planner,
        density: DensitySchedule,
        dense_first: bool = True,
        overlap: bool = True,
        deferred: bool = False,
        offload: Offloader | None = None,
        ticks: Ticks | None = None,
    ) -> None:
        self.space = space
        self.planner = planner
        self.transport = planner.transport
        self.density = density
        self.dense_first = dense_first
        self.opening: Opening | None = None  #: of schedules that open; set from outside
        self.overlap = overlap
        self.ticks = ticks
        self.windows = 0  #: windows drained so far
        self.epoch = 0  #: for the density schedule; set from outside
        self.loss_scale: Callable[[], Tensor | None] | None = None  #: read at the first gradient of a window
        self.notices = 0  #: bits of Notice that this rank sends to all in its next messages
        self.heard = 0  #: bits of Notice that some rank has sent: the same on all ranks at the end of every window
        self.report: WindowRecord | None = None  #: of the latest window
        self.clock = clock_for(space.device)
        self.observers: list[Observer] = []
        self.order_known = False  #: the layout has the order in which gradients arrive
        # A tensor that is submitted again before its optimizer has stepped is sent dense and without its residual: the
        # gradient that was exchanged before has been thrown away, and this one may be. By registration index:
        self.tracked = np.zeros(len(space.layout), bool)  #: [L]: an optimizer that uses the gradient is watched
        self.unstepped = np.zeros(len(space.layout), bool)  #: [L]: exchanged, and its optimizer has not stepped yet
        self._constant = density if isinstance(density, ConstantDensity) else None
        self._unobserved: WindowRecord | None = None  # its times are not known yet
        self._timed: WindowEvents | None = None  # of the latest window that recorded everything
        self._followed: Plan | None = None  # the space has no buffers but those of this plan
        self._order: list[int] | None = None  # to be adopted before the next window
        self._undecided = Undecided(space)
        self._wary_until = 0  # number of the window
        self._first = True  # DDP's first window submits everything at its end, in an order that means nothing
        self.between = True  #: no window is open, and the last one has ended: exchanges have equal states on all ranks
        self._window: Window | None = None
        self._shipments: list[Shipment] = []  # of the open window, launched, in order
        self._advanced = 0  # so many of them have launched all their phases
        self._lane = Lane(space.device)  # selection and packing run beside the backward pass
        self.fused = FusedPath(space.device)  #: the kernels of buffers that have some
        self._drain = Drain(space, self.transport, self.fused)
        self._device_drain = DeviceDrain(space.device, self.fused) if deferred else None
        self._counts: LargestCounts | None = None  # what this rank says in a review of shared quotas
        self._offload = offload
        self._overflow = OverflowGuard(space, self.transport)

    @property
    def _reviews_at_end(self) -> bool:
        """Whether reviews, which are collective and wait for the device, end a window; else they begin the next one.

        Where ranks submit a tensor at different points, that would be at different points of their backward passes.
        """
        return self.clock.instant or not self.overlap

    @property
    def dense(self) -> bool:
        """Whether the next window is averaged as DDP does, without buffers."""
        return self.dense_first and not self.windows

    @property
    def next_density(self) -> float:
        """Density of the next window."""
        density = self._scheduled
        return max(density, self.opening(self.windows)) if self.opening and self.density.opens else density

    @property
    def _scheduled(self) -> float:
        """The same without an opening."""
        constant = self._constant
        return constant.density if constant is not None else self.density(self.windows, self.epoch)

    @property
    def undecided(self) -> bool:
        """Whether it depends on the steps of optimizers what leaves the residual of the last window."""
        return self._undecided.window is not None

    @property
    def complete(self) -> bool:
        """Whether every tensor of the open window has been pushed."""
        return self._window is not None and self._window.complete

    def missing(self) -> list[str]:
        """Names of the tensors that the open window still waits for; empty if none is open."""
        grads = self._window.grads if self._window is not None else []
        return self.space.layout.names(place for place, grad in enumerate(grads) if grad is None)

    def push(self, index: int, grad: Tensor, fresh: bool = True) -> bool:
        """Takes one gradient, and launches the buffer that it completes; returns whether the window is complete.

        Args:
            index: Registration index of its parameter.
            grad: Flat gradient, any floating dtype; :meth:`drain` writes the mean over ranks into it.
            fresh: Whether it was computed since the last window. A stale tensor sends nothing, and if it is stale on
                all ranks it is left exactly as it is.
        """
        begin = perf_counter()
        window = self._window or self._begin()
        place = self.space.layout.places[index]
        if window.grads[place] is not None:
            self.reset()  # the last backward never finished, and the model is trained on: a new window begins
            window = self._begin()
        group = window.submit(place, grad, fresh, window.repeats and fresh and bool(self.unstepped[index]))
        if window.timed and not self.clock.instant:
            window.note_call(place, begin)
        if self._offload is not None and self._offload.wants(place):
            with self._lane.fork():
                self._offload.offer(window, place, grad)
        if group is not None:
            self._launch(window, group)
        if self.ticks is not None and window.ticking:
            self._fuse(window, self.ticks.poll(window.ready))
        elif window.complete and not window.plain:
            self._launch_rest(window)
        window.calls += perf_counter() - begin
        return window.complete

    def finish(self) -> None:
        """The host waits for what a device still does for a window that was forgotten: it may write into gradients.

        Called before a backward pass.
        """
        if self._device_drain is not None:
            self._device_drain.finish()

    def _begin(self) -> Window:
        self.finish()
        self.settle()
        if self._overflow.pending:
            self._overflow.reset(together=True)
        self._review_shares()
        self.between = False
        density = self.next_density
        if density != self.space.quotas.density:
            self.space.set_density(density)
            self.planner.invalidate()
        self.planner.opening = self.density.opens and density > self._scheduled
        plain = self.dense
        plan = self.planner.plan(self.space.shape) if self.order_known and not plain else None
        ticking = False
        if self.ticks is not None and self.overlap and plan is not None and plan.groups:
            self.ticks.begin()
            ticking = True
        elif plan is not None and plan is not self._followed:
            self._followed = plan
            if not self.space.buffers.keys() >= {*plan.groups}:  # their sizes are others
                self._free_shared()
            self.space.keep_only(plan.groups)
            if self._offload is not None:
                self._offload.follow(plan, self.planner.costs(self.space.shape).ready)
        surveyed = self.windows < _TIMED_WINDOWS or self.windows % _TIMED_EVERY == 0 or self.planner.wants_times
        scale = self.loss_scale() if self.loss_scale is not None else None
        repeats = bool(self.unstepped.any())
        wary = self.windows < self._wary_until
        self._window = Window(
            len(self.space.layout.specs),
            () if plan is None or ticking else plan.groups,
            self.windows,
            density,
            self.clock,
            surveyed=surveyed,
            timed=surveyed or bool(self.observers),
            ticking=ticking,
            hold=not self.overlap,
            # a scaler waits for the device anyway, and a tensor whose gradient was thrown away needs the host
            deferred=self._device_drain is not None and scale is None and not repeats and not wary,
            repeats=repeats,
            plain=plain,
            wary=wary or scale is not None,
            # a copy: the scaler updates its factor in place
            scale=scale.detach().clone() if scale is not None else None,
        )
        return self._window

    def _launch(self, window: Window, group: Group) -> None:
        """Fills the buffer of a group and sends it; one that waits for the host's selections is sent with the next."""
        with self._lane.fork():
            buffer = self.space.buffers.get(group) or self.space.buffer(group)
            if self._offload is None:
                shipment = self.fused.shipment(buffer, window, self.space.selector)
                shipment.fill(self.space.selector)
                self._send(shipment)
            else:
                self._send(self._offload.fill(Shipment(buffer, window)))
        window.launched = group.stop

    def _send(self, shipment: Shipment | None) -> None:
        if shipment is None:
            return
        shipment.pack(self.notices)
        shipment.launch()
        if self._device_drain is not None and shipment.window.deferred:
            self._device_drain.launched(shipment)
        self._shipments.append(shipment)
        while self._advanced < len(self._shipments) and self._shipments[self._advanced].advance(wait=False):
            self._advanced += 1

    def _fuse(self, window: Window, ready: int) -> None:
        """Launches what a tick has found ready on all ranks."""
        if ready > window.launched:
            for group in self.planner.fuse(self.space.shape, window.launched, ready):
                self._launch(window, group)

    def _launch_rest(self, window: Window) -> None:
        """Launches planned groups that gradients out of order have delayed; everything if nothing is planned."""
        for group in window.groups[window.next_group :]:
            self._launch(window, group)
        if window.launched < window.length:
            collective = self.planner.fallback(self.space.shape, sparse=not self.dense_first)
            edges = self.space.layout.edges
            while (start := window.launched) < window.length:
                stop = int(np.searchsorted(edges, edges[start] + _UNPLANNED_ELEMENTS, side="right")) - 1
                self._launch(window, Group(start, max(start + 1, stop), collective))
        if self._offload is not None:
            with self._lane.fork():
                self._send(self._offload.last())

    def drain(self) -> None:
        """Waits for all buffers, writes the means into the gradients, and commits the window if it ended well.

        Raises:
            WorkerLostError: If a peer is lost (with the buffer's tensors).
            RuntimeError: If a rank could not fill its message.
        """
        window = self._window
        if window is None or not window.complete:
            raise RuntimeError(f"drain needs a complete window; tensors not seen: {', '.join(self.missing()[:20])}")
        if self.ticks is not None and window.ticking:
            for ready in self.ticks.rest(window.length):
                self._fuse(window, ready)
            # the next window has other buffers
            self.space.keep_only([shipment.buffer.group for shipment in self._shipments])
        shipments, self._shipments, self._window, self._advanced = self._shipments, [], None, 0
        if self._offload is not None:
            self._offload.forget()  # what an error has left
        if not self.clock.instant:
            self._lane.join()
        if not window.plain and self.space.shares_due(self.windows):
            self._counts = self.space.count_largest()
        if self._device_drain is not None and window.deferred and not window.plain:
            good, notices = self._device_drain.run(window, shipments)
        else:
            good, notices = self._drain.run(window, shipments, self.notices)
        if notices:
            self._hear(window, notices)
        exchanged = self._exchanged(window)
        self.unstepped[exchanged] = self.tracked[exchanged]
        if not good:
            self._counts = None
            self._undecided.keep(window, shipments)
        window.drained = window.mark()
        self.between = True
        planned = self.order_known and window.in_order and not window.plain
        self.report = WindowRecord(window, shipments, self.space, self.clock, planned, self._timed)
        if self._reviews_at_end:
            self._observe(self.report)
        else:
            self._unobserved = self.report
        if not window.in_order and not (self._first and self.order_known):
            self._order = window.order
            if good and not window.deferred:
                self._follow_order()
        self.order_known |= self.windows > 0 and not self._first
        self._first = False
        self.windows += 1
        if self._reviews_at_end:
            self._review_shares()

    def _review_shares(self) -> None:
        """Reviews shared quotas, if a window has counted for it."""
        counts, self._counts = self._counts, None
        if counts is not None:
            with during(f"the review of shared quotas after step {self.windows - 1}"):
                self.space.review_shares(counts.read())

    def drop_gradients(self) -> None:
        """Drops the gradients of the first window: DDP is about to make other buckets, in place of theirs."""
        if self.windows == 1 and self.report is not None:
            self.report.drop_gradients()

    def settle(self) -> None:
        """Reads what the device decided of the last window, if the host does not know it yet.

        Raises:
            RuntimeError: If a rank could not fill its message, or some ranks had no gradient of a tensor.
        """
        if self._device_drain is not None and (outcome := self._device_drain.read()) is not None:
            window, shipments, good, notices = outcome
            self._hear(window, notices)
            if not good:
                self._undecided.keep(window, shipments)
        self.heard |= self._drain.read()
        self.notices &= ~self.heard
        if (undecided := self._undecided.window) is not None:
            self._undecided.decide(self.unstepped)
            self.unstepped[self._exchanged(undecided)] = False
            self._wary_until, self._overflow.pending = undecided.step + _WARY_WINDOWS, True
        if self._overflow.pending:
            self._overflow.reset(together=False)
        record, self._unobserved = self._unobserved, None
        if record is not None:
            self._observe(record)
        self._follow_order()

    def _follow_order(self) -> None:
        """Adopts the order of the last window, if that was another one."""
        order, self._order = self._order, None
        if order is not None:
            self.adopt_order(order)

    def _hear(self, window: Window, notices: int) -> None:
        self.heard |= notices
        self.notices &= ~self.heard
        if self.heard & Notice.FAILED:
            self.heard &= ~Notice.FAILED
            raise window.error or RuntimeError(
                "another rank could not select its gradients in this step; see that rank's own error"
            )

    def _exchanged(self, window: Window) -> np.ndarray:
        """Registration indices of the tensors whose gradients a window has exchanged."""
        return self.space.layout.indices if window.regular else self.space.layout.indices[window.fresh]

    def _observe(self, record: WindowRecord) -> None:
        """Gives the times of a window to the planner and to all observers."""
        if record.planned:
            # observers may differ between ranks: the planner, whose agreements are collective, ignores them
            known = self.clock.instant or record.surveyed
            self.planner.observe(record.events if known else None, self.space.shape)
        if record.timed:
            self._timed = record.events
            for observer in self.observers:
                observer.observe(record.events)

    def average(self, grads: Sequence[Tensor]) -> None:
        """Writes the means over ranks into flat gradients of no tensor of the layout, as DDP does. Collective."""
        self._drain.average(grads)

    def adopt_order(self, order: list[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        self.space.reorder(order)
        self.planner.invalidate(order_changed=True)

    def step_aside(self) -> bool:
        """Whether plain DDP does the rest of the job: that was agreed, and no residual remains on any rank.

        One remains of a tensor that had no gradient while everything was dense. Collective once it was agreed.
        """
        if not self.planner.dense_for_good:
            return False
        holds = self.space.holds_residual(self.transport)
        if holds:
            self.planner.keep_engine(self.space.shape)
        return not holds

    def reset(self) -> None:
        """Forgets an open window. Nothing is lost: what it had added to the residual stays there.

        The host waits for the selection, never for another worker: what a device still exchanges and decodes is waited
        for in :meth:`finish`.
        """
        if self._offload is not None:
            self._offload.forget()
        if self._window is not None and not self.clock.instant:
            self._lane.synchronize()
        self._window, self._shipments, self._unobserved, self._advanced = None, [], None, 0
        self._order = None
        self._undecided.forget()
        if self._device_drain is not None:
            self._device_drain.forget()
        self._drain.forget()
        # the state of an exchange that was abandoned may differ between ranks
        self.space.restore_exchanges(self.space.exchange_state() if self.between else [])
        self.between = True

    def release(self) -> None:
        """Frees buffers and figures; the state that a checkpoint holds stays."""
        self.reset()
        self.report = None
        self._free_shared()
        if self._offload is not None:
            self._offload.release()
        native.release()

    def _free_shared(self) -> None:
        """Frees what buffers use in turn, which has the size of the largest: the first one holds the whole model."""
        self._drain.scratch.release()
        if self.space.selector.units is not None:
            self.space.selector.units.release()
        if self._device_drain is not None:
            self._device_drain.release()
        else:
            self.fused.release()
