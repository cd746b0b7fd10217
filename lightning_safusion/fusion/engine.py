"""The engine: gradients are pushed, full buffers launched, and at the end of a window drained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport.interface import DamagedMessageError
from lightning_safusion.fusion.backward import BackwardPass
from lightning_safusion.fusion.ending.base import Ending, Outcome
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.ending.host import HostEnding
from lightning_safusion.fusion.ending.overflow import OverflowGuard
from lightning_safusion.fusion.ending.undecided import OptimizerSteps, Undecided
from lightning_safusion.fusion.events import Observer, WindowEvents, clock_for
from lightning_safusion.fusion.launching.planned import Launching
from lightning_safusion.fusion.opening import FirstWindows
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.fusion.window import Notices, Window
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule, Opening

# The end of a collective is recorded by a callback on the backend's thread, which stops the backward's for the
# interpreter's lock: in every window at first, then in one of 16 and whenever the planner needs it.
_TIMED_WINDOWS, _TIMED_EVERY = 64, 16
# Windows after one with a gradient that is not finite in which the next such window is expected.
_WARY_WINDOWS = 100
_COUNTERS = ("windows", "epoch")


class Engine:
    """What outlives a window: :meth:`push` every gradient of one, then :meth:`drain`.

    A gradient that completes a buffer makes a :class:`Shipment`: the gradients are added to the residual and elements
    are selected from the sum (``fill``), written (``pack``) and sent (``launch``). :meth:`drain` waits for the messages
    of all ranks, writes the means into the gradients (``decode``) and takes what was sent out of the residual
    (``commit``). :class:`Window` calls them.

    Every rank must push the same tensors in the same order (DDP's bucket order does), which makes every decision here
    the same on all ranks: nothing depends on a local count or clock.

    Args:
        launching: Says when buffers are filled and sent; it has the gradient space and the planner.
        density: Density by step and epoch.
        overlap: Launch buffers while gradients still arrive. Not where a tensor is submitted at different points of the
            backward pass on different ranks (unused on some): the collectives of the model's own backward
            (SyncBatchNorm) would meet ours in different orders.
        deferred: Read the flags of all ranks one window late (:class:`DeviceEnding`), so that the host never waits for
            the device. Only where every tensor gets a gradient on all ranks in every window.
    """

    def __init__(
        self, launching: Launching, density: DensitySchedule, overlap: bool = True, deferred: bool = False
    ) -> None:
        self.launching, self.space, self.planner = launching, launching.space, launching.planner
        self.transport = self.planner.transport
        self.fused = launching.fused  #: the kernels of buffers that have some
        self.density = density
        self.first_windows = FirstWindows()  #: of schedules that open
        self.overlap = overlap
        self.windows = 0  #: windows drained so far
        self.epoch = 0  #: for the density schedule
        self.loss_scale: Callable[[], Tensor | None] | None = None  #: read at the first gradient of a window
        self.notices = Notices()
        self.record: WindowRecord | None = None  #: of the latest window
        self.clock = clock_for(self.space.device)
        self.observers: list[Observer] = []
        self.order_known = False  #: the layout has the order in which gradients arrive
        self.steps = OptimizerSteps(len(self.space.layout))
        self.between = True  #: no window is open, and the last one has ended: exchanges have equal states on all ranks
        self._constant = density if isinstance(density, ConstantDensity) else None
        self._unobserved: WindowRecord | None = None  # its times are not known yet
        self._timed: WindowEvents | None = None  # of the latest window that recorded everything
        self._followed: Plan | None = None  # the space has no buffers but those of this plan
        self._order: list[int] | None = None  # to be adopted before the next window
        self._undecided = Undecided(self.space)
        self._wary_until = 0  # number of the window
        self._first = True  # DDP's first window submits everything at its end, in an order that means nothing
        self._window: Window | None = None
        self._forgotten: Window | None = None  # whose later phases some ranks have launched, and others have not
        self._host = HostEnding(self.space, self.transport, self.fused)
        self._endings: list[Ending] = [self._host]  # the last one where the host need not decide
        if deferred:
            self._endings.append(DeviceEnding(self.space.device, self.fused))
        self._overflow = OverflowGuard(self.space, self.transport)

    # What a job tells it

    def bind(
        self,
        observers: list[Observer] | None = None,
        loss_scale: Callable[[], Tensor | None] | None = None,
    ) -> None:
        """Who is told of every window, and where the factor of the loss is read; None leaves what it has."""
        self.observers = self.observers if observers is None else observers
        self.loss_scale = loss_scale or self.loss_scale

    def open_with(self, opening: Opening | None, dense: bool, rate: Callable[[], float]) -> None:
        """How the first windows differ from later ones, where the density schedule opens.

        Args:
            opening: Of the density.
            dense: The first window may be averaged as DDP does; if not, it never is again.
            rate: Share of the largest learning rate that the coming step has, in [0, 1].
        """
        self.first_windows.opening, self.first_windows.rate = opening, rate
        self.launching.dense_first &= dense

    def begin_backward(self, epoch: int) -> None:
        """A backward pass begins, in an epoch."""
        self.finish()
        self.epoch = epoch

    def counters(self) -> dict[str, Any]:
        """What another engine of the same job goes on counting: for :meth:`resume`."""
        counted = {name: getattr(self, name) for name in _COUNTERS}
        return counted | vars(self.notices) | {"first_windows": self.first_windows.state_dict()}

    def resume(self, counters: Mapping[str, Any]) -> None:
        """Goes on counting where another engine of the same job has stopped."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self.first_windows.load_state_dict(counters["first_windows"])
        self.notices = Notices(counters["own"], counters["heard"])

    def restart(self, windows: int) -> None:
        """Forgets the order of the gradients, and goes on after so many windows."""
        self.reset()
        self.windows, self.order_known = windows, False
        self.planner.invalidate(order_changed=True)

    # What it knows

    @property
    def _reviews_at_end(self) -> bool:
        """Whether reviews, which are collective and wait for the device, end a window; else they begin the next one.

        Where ranks submit a tensor at different points, that would be at different points of their backward passes.
        """
        return self.clock.instant or not self.overlap

    @property
    def dense(self) -> bool:
        """Whether the next window is averaged as DDP does, without buffers."""
        return self.launching.dense_first and not self.windows

    @property
    def next_density(self) -> float:
        """Density of the next window."""
        density = self._scheduled
        return max(density, self.first_windows.density(self.windows)) if self.density.opens else density

    @property
    def _scheduled(self) -> float:
        """The same without an opening."""
        constant = self._constant
        return constant.density if constant is not None else self.density(self.windows, self.epoch)

    @property
    def undecided(self) -> bool:
        """Whether it depends on the steps of optimizers what leaves the residual of the last window."""
        return self._undecided.outcome is not None

    @property
    def complete(self) -> bool:
        """Whether every tensor of the open window has been pushed."""
        return self._window is not None and self._window.backward.complete

    def missing(self) -> list[str]:
        """Names of the tensors that the open window still waits for; empty if none is open."""
        grads = self._window.backward.grads if self._window is not None else []
        return self.space.layout.names(place for place, grad in enumerate(grads) if grad is None)

    # A window

    def push(self, index: int, grad: Tensor, fresh: bool = True) -> bool:
        """Takes one gradient, and launches the buffer that it completes; returns whether the window is complete.

        Args:
            index: Registration index of its parameter.
            grad: Flat gradient, any floating dtype; :meth:`drain` writes the mean over ranks into it.
            fresh: Whether it was computed since the last window. A stale tensor sends nothing, and if it is stale on
                all ranks it is left exactly as it is.
        """
        since = perf_counter()
        window = self._window or self._begin()
        place = self.space.layout.places[index]
        if window.backward.grads[place] is not None:
            self.reset()  # the last backward never finished, and the model is trained on: a new window begins
            window = self._begin()
        repeated = window.backward.repeats and fresh and bool(self.steps.unstepped[index])
        window.push(place, grad, fresh, repeated, since)
        return window.backward.complete

    def finish(self) -> None:
        """The host waits for what a device still does for a window that was forgotten: it may write into gradients.

        Called before a backward pass.
        """
        for ending in self._endings:
            ending.finish()

    def _begin(self) -> Window:
        self.finish()
        if self._forgotten is not None:
            forgotten, self._forgotten = self._forgotten, None
            forgotten.launch_phases()
        self.settle()
        if self._overflow.pending:
            self._overflow.reset(together=True)
        self.space.review_shares(self.windows - 1)
        self.between = False
        self.first_windows.tell(self.notices)
        density = self.next_density
        if density != self.space.quotas.density:
            self.space.set_density(density)
            self.planner.invalidate()
        self.planner.opening = self.density.opens and density > self._scheduled
        plain = self.dense
        plan = self.planner.plan(self.space.shape) if self.order_known and not plain else None
        groups = () if plan is None else self.launching.begin(plan)
        if groups and plan is not None and plan is not self._followed:
            self._follow(plan)
        surveyed = self.windows < _TIMED_WINDOWS or self.windows % _TIMED_EVERY == 0 or self.planner.wants_times
        scale = self.loss_scale() if self.loss_scale is not None else None
        repeats = bool(self.steps.unstepped.any())
        wary = self.windows < self._wary_until
        # a scaler waits for the device anyway, and a tensor whose gradient was thrown away needs the host
        deferred = len(self._endings) > 1 and scale is None and not repeats and not wary
        backward = BackwardPass(
            len(self.space.layout.specs),
            groups,
            self.windows,
            density,
            self.clock,
            surveyed=surveyed,
            timed=surveyed or bool(self.observers),
            hold=not self.overlap,
            deferred=deferred,
            repeats=repeats,
            plain=plain,
            wary=wary or scale is not None,
            # a copy: the scaler updates its factor in place
            scale=scale.detach().clone() if scale is not None else None,
        )
        ending = self._endings[-1] if deferred and not plain else self._host
        self._window = Window(backward, self.launching, ending, self.notices)
        return self._window

    def _follow(self, plan: Plan) -> None:
        """Makes room for the buffers of another plan."""
        self._followed = plan
        if not self.space.buffers.keys() >= {*plan.groups}:  # their sizes are others
            self._free_shared()
        self.space.keep_only(plan.groups)
        self.launching.follow(plan)

    def drain(self) -> None:
        """Waits for all buffers, writes the means into the gradients, and commits the window if it ended well.

        Raises:
            WorkerLostError: If a peer is lost (with the buffer's tensors).
            DamagedMessageError: On all ranks, if a checksum is not that of its message.
            RuntimeError: If a rank could not fill its message.
        """
        window = self._window
        if window is None or not window.backward.complete:
            raise RuntimeError(f"drain needs a complete window; tensors not seen: {', '.join(self.missing()[:20])}")
        self._window = None
        try:
            outcome, backward = window.end(), window.backward
        except DamagedMessageError:
            self.reset()  # what exchanges have learned in it may differ between ranks
            raise
        if outcome.notices:
            self._hear(outcome)
        self.steps.exchanged(self._exchanged(backward))
        if not outcome.good:
            self.space.forget_counts()
            self._undecided.outcome = outcome
        backward.drained = backward.mark()
        self.between = True
        planned = self.order_known and backward.in_order and not backward.plain
        self.record = WindowRecord(backward, window.shipments, self.space, self.clock, planned, self._timed)
        at_end = self._reviews_at_end
        if at_end:
            self._observe(self.record)
        else:
            self._unobserved = self.record
        if not backward.in_order and not (self._first and self.order_known):
            self._order = backward.order
            if outcome.good and not backward.deferred:
                self._follow_order(backward.order)
        self.order_known |= self.windows > 0 and not self._first
        self._first = False
        self.windows += 1
        self.first_windows.count()
        if at_end:
            self.space.review_shares(self.windows - 1)

    def drop_gradients(self) -> None:
        """Drops the gradients of the first window: DDP is about to make other buckets, in place of theirs."""
        if self.windows == 1 and self.record is not None:
            self.record.drop_gradients()

    def settle(self) -> None:
        """Reads what the device decided of the last window, if the host does not know it yet.

        Raises:
            RuntimeError: If a rank could not fill its message, or some ranks had no gradient of a tensor.
        """
        for ending in self._endings:
            if (outcome := ending.read()) is not None:
                if outcome.notices:
                    self._hear(outcome)
                if not outcome.good:
                    self._undecided.outcome = outcome
        if (undecided := self._undecided.outcome) is not None:
            self._undecided.decide(self.steps.unstepped)
            self.steps.stepped(self._exchanged(undecided.backward))
            self._wary_until, self._overflow.pending = undecided.backward.step + _WARY_WINDOWS, True
        if self._overflow.pending:
            self._overflow.reset(together=False)
        record, self._unobserved = self._unobserved, None
        if record is not None:
            self._observe(record)
        if self._order is not None:
            self._follow_order(self._order)

    def _follow_order(self, order: list[int]) -> None:
        """Adopts the order of the last window, which was another one."""
        self._order = None
        self.adopt_order(order)

    def _hear(self, outcome: Outcome) -> None:
        self.notices.hear(outcome.notices)
        if self.notices.take(Notice.FAILED):
            raise outcome.backward.error or RuntimeError(
                "another rank could not select its gradients in this step; see that rank's own error"
            )
        self.first_windows.hear(self.notices, outcome.backward.step + 1)

    def _exchanged(self, backward: BackwardPass) -> np.ndarray:
        """Registration indices of the tensors whose gradients a window has exchanged."""
        return self.space.layout.indices if backward.regular else self.space.layout.indices[backward.fresh]

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
        self._host.average(grads)

    def adopt_order(self, order: list[int], known: bool | None = None) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``.

        Args:
            order: Places of today.
            known: Whether gradients arrive in it; None leaves what was known.
        """
        self.order_known = self.order_known if known is None else known
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
        self.launching.forget()
        if self._window is not None and not self.clock.instant:
            self.launching.lane.synchronize()
        if self.clock.instant:  # elsewhere no phase is launched by what has arrived on this rank
            self._forgotten = self._window or self._forgotten
        self._window = self._unobserved = self._order = self._undecided.outcome = None
        for ending in self._endings:
            ending.forget()
        # the state of an exchange that was abandoned may differ between ranks
        self.space.restore_exchanges(self.space.exchange_state() if self.between else [])
        self.between = True

    def release(self) -> None:
        """Frees buffers and figures; the state that a checkpoint holds stays."""
        self.reset()
        self.record = self._forgotten = None
        self._free_shared()
        self.launching.release()
        native.release()

    def _free_shared(self) -> None:
        """Frees what buffers use in turn, which has the size of the largest: the first one holds the whole model."""
        if self.space.selector.units is not None:
            self.space.selector.units.release()
        released = [ending.release() for ending in self._endings]
        if all(released):
            self.fused.release()
