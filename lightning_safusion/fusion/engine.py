"""The engine: gradients are pushed, full buffers launched, and at the end of a window drained."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from torch import Tensor

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport.interface import DamagedMessageError
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.ending.host import HostEnding
from lightning_safusion.fusion.ending.undecided import OptimizerSteps, OverflowGuard, Undecided
from lightning_safusion.fusion.events import Observer, WindowEvents, clock_for
from lightning_safusion.fusion.launching.planned import Launching
from lightning_safusion.fusion.opening import FirstWindows
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.fusion.window import Notices, Outcome, Window
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.schedule import DensitySchedule, Opening

# The end of a collective is recorded by a callback on the backend's thread, which stops the backward's for the
# interpreter's lock: in every window at first, then in one of 16 and whenever the planner needs it.
_TIMED_WINDOWS, _TIMED_EVERY = 64, 16


class Engine:
    """What outlives a window: :meth:`push` every gradient of one, then :meth:`drain`.

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
        self._unobserved: WindowRecord | None = None  # its times are not known yet
        self._timed: WindowEvents | None = None  # of the latest window that recorded everything
        self._followed: Plan | None = None  # the space has no buffers but those of this plan
        self._order: list[int] | None = None  # to be adopted before the next window
        self._undecided = Undecided(self.space, self.steps, OverflowGuard(self.space, self.transport))
        self._first = True  # DDP's first window submits everything at its end, in an order that means nothing
        self._rebuilds = True  # after it DDP makes other buckets, also in a job that is resumed
        self._window: Window | None = None
        self._forgotten: Window | None = None  # of which some ranks have launched more than others
        ending = DeviceEnding if deferred else HostEnding
        self.ending: HostEnding = ending(self.space, self.transport, self.fused)  #: of all windows

    # What a job tells it

    def bind(
        self, observers: list[Observer] | None = None, loss_scale: Callable[[], Tensor | None] | None = None
    ) -> None:
        """Who is told of every window, and where the factor of the loss is read; None leaves what it has."""
        self.observers = self.observers if observers is None else observers
        self.loss_scale = loss_scale or self.loss_scale

    def open_with(self, opening: Opening | None, dense: bool, rate: Callable[[], float]) -> None:
        """How the first windows differ from later ones, where the density schedule opens.

        Args:
            dense: The first window may be averaged as DDP does; if not, it never is again.
            rate: Share of the largest learning rate that the coming step has, in [0, 1].
        """
        self.first_windows.opening, self.first_windows.rate = opening, rate
        self.launching.dense_first &= dense

    def begin_batch(self) -> None:
        """A batch begins. After the first window DDP is about to make other buckets in place of its gradients."""
        self.ending.finish()
        if self._rebuilds and self.record is not None:
            self._rebuilds = False
            self.record.drop_gradients()

    def begin_backward(self, epoch: int) -> None:
        """A backward pass begins, in an epoch."""
        self.ending.finish()
        self.epoch = epoch

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

    def densities(self) -> tuple[float, float]:
        """Of the next window: what the schedule says, and what is sent; of the first windows that may be more."""
        lasting = self.density(self.windows, self.epoch)
        return lasting, max(lasting, self.first_windows.density(self.windows)) if self.density.opens else lasting

    @property
    def undecided(self) -> bool:
        """Whether it depends on the steps of optimizers what leaves the residual of the last window."""
        return self._undecided.outcome is not None

    @property
    def complete(self) -> bool:
        """Whether every tensor of the open window has been pushed."""
        return self._window is not None and self._window.complete

    def missing(self) -> list[str]:
        """Names of the tensors that the open window still waits for; empty if none is open."""
        grads = self._window.grads if self._window is not None else []
        return self.space.layout.names(place for place, grad in enumerate(grads) if grad is None)

    # A window

    def push(self, index: int, grad: Tensor, fresh: bool = True) -> bool:
        """Takes one gradient, and launches the buffer that it completes; returns whether the window is complete.

        Args:
            index: Registration index of its parameter.
            grad: Flat, of any floating dtype; :meth:`drain` writes the mean over ranks into it.
            fresh: Computed since the last window. A tensor that is stale on all ranks is left exactly as it is.
        """
        since = perf_counter()
        window = self._window or self._begin()
        place = self.space.layout.places[index]
        if window.grads[place] is not None:
            self.reset()  # the last backward never finished, and the model is trained on: a new window begins
            window = self._begin()
        repeated = window.repeats and fresh and bool(self.steps.unstepped[index])
        window.push(place, grad, fresh, repeated, since)
        return window.complete

    def _begin(self) -> Window:
        self.ending.finish()
        if self._forgotten is not None:
            forgotten, self._forgotten = self._forgotten, None
            forgotten.launch_phases()
        self.settle()
        if self._undecided.overflow.pending:
            self._undecided.overflow.reset(together=True)
        self.space.review_shares(self.windows - 1)
        self.between = False
        self.first_windows.tell(self.notices)
        lasting, density = self.densities()
        if density != self.space.quotas.density:
            self.space.set_density(density)
            self.planner.invalidate()
        self.planner.opening = density > lasting
        self._window = self._opened(density)
        return self._window

    def _opened(self, density: float) -> Window:
        plain = self.dense
        plan = self.planner.plan(self.space.shape) if self.order_known and not plain else None
        groups = () if plan is None else self.launching.begin(plan)
        if groups and plan is not None and plan is not self._followed:
            self._follow(plan)
        surveyed = self.windows < _TIMED_WINDOWS or self.windows % _TIMED_EVERY == 0 or self.planner.wants_times
        scale = self.loss_scale() if self.loss_scale is not None else None
        repeats = bool(self.steps.unstepped.any())
        wary = self.windows < self._undecided.wary_until or scale is not None
        return Window(
            self.launching,
            self.ending,
            self.notices,
            self.clock,
            self.windows,
            density,
            groups,
            surveyed=surveyed,
            timed=surveyed or bool(self.observers),
            hold=not self.overlap,
            # a scaler waits for the device anyway, and a tensor whose gradient was thrown away needs the host
            deferred=self.ending.defers and not repeats and not wary,
            repeats=repeats,
            plain=plain,
            wary=wary,
            # a copy: the scaler updates its factor in place
            scale=scale.detach().clone() if scale is not None else None,
        )

    def _follow(self, plan: Plan) -> None:
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
        if window is None or not window.complete:
            raise RuntimeError(f"drain needs a complete window; tensors not seen: {', '.join(self.missing()[:20])}")
        self._window = None
        try:
            outcome = window.end()
        except DamagedMessageError:
            self.reset()  # what exchanges have learned in it may differ between ranks
            raise
        if outcome.notices or not outcome.good:
            self._hear(outcome)
        self.steps.exchanged(window.exchanged)
        if not outcome.good:
            self.space.forget_counts()
        window.drained = window.mark()
        self.between = True
        planned = self.order_known and window.in_order and not window.plain
        self.record = WindowRecord(window, outcome.shipments, self.space, planned, self._timed)
        at_end = self._reviews_at_end
        if at_end:
            self._observe(self.record)
        else:
            self._unobserved = self.record
        if not window.in_order and not (self._first and self.order_known):
            self._order = window.order
            if outcome.good and not window.deferred:
                self.adopt_order(window.order)
        self.order_known |= self.windows > 0 and not self._first
        self._first = False
        self.windows += 1
        self.first_windows.count()
        if at_end:
            self.space.review_shares(self.windows - 1)

    def settle(self) -> None:
        """Reads what the device decided of the last window, if the host does not know it yet.

        Raises:
            RuntimeError: If a rank could not fill its message, or some ranks had no gradient of a tensor.
        """
        if (outcome := self.ending.read()) is not None:
            self._hear(outcome)
        if self._undecided.outcome is not None:
            self._undecided.decide(self._undecided.outcome)
        record, self._unobserved = self._unobserved, None
        if record is not None:
            self._observe(record)
        if self._order is not None:
            self.adopt_order(self._order)

    def _hear(self, outcome: Outcome) -> None:
        if outcome.notices:
            self.notices.hear(outcome.notices)
            if self.notices.take(Notice.FAILED):
                raise outcome.window.error or RuntimeError(
                    "another rank could not select its gradients in this step; see that rank's own error"
                )
            self.first_windows.hear(self.notices, outcome.window.step + 1)
        if not outcome.good:
            self._undecided.outcome = outcome

    def _observe(self, record: WindowRecord) -> None:
        if record.planned:
            # observers may differ between ranks: the planner, whose agreements are collective, ignores them
            known = self.clock.instant or record.surveyed
            self.planner.observe(record.events if known else None, self.space.shape)
        if record.timed:
            self._timed = record.events
            for observer in self.observers:
                observer.observe(record.events)

    def adopt_order(self, order: list[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        self._order = None
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
        for before the next one.
        """
        self.launching.forget()
        if self._window is not None and not self.clock.instant:
            self.launching.lane.synchronize()
        # elsewhere nothing is launched that depends on this rank alone
        if self.clock.instant or self.planner.policy.streams:
            self._forgotten = self._window or self._forgotten
        self._window = self._unobserved = self._order = self._undecided.outcome = None
        self.ending.forget()
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
        if self.ending.release():
            self.fused.release()
