"""The engine: takes gradients in, launches full buffers, drains them, gives the means back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.clock import clock_for
from lightning_safusion.fusion.device_drain import DeviceDrain
from lightning_safusion.fusion.drain import Drain
from lightning_safusion.fusion.events import Observer, WindowEvents
from lightning_safusion.fusion.lane import Lane
from lightning_safusion.fusion.offload import Offloader
from lightning_safusion.fusion.overflow import OverflowGuard
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.ticks import Ticks
from lightning_safusion.fusion.window import Window, unmarked
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule

# The end of a collective is told by a callback on the backend's thread, which stops the backward's for the
# interpreter's lock: recorded in every window at first, then in one of 16 and whenever the planner needs it.
_TIMED_WINDOWS, _TIMED_EVERY = 64, 16

# Until the order of the gradients is known everything leaves at the end, in pieces that bound the memory of a buffer.
_UNPLANNED_ELEMENTS = 1 << 25

_HERE: AbstractContextManager[None] = nullcontext()


class Engine:
    """Runs backward windows: :meth:`push` every gradient, then :meth:`drain`.

    Every rank must push the same tensors in the same order (DDP's bucket order does), which makes every decision here
    the same on all ranks: nothing depends on a local count or clock.

    Args:
        space: Order, quotas, residual and buffers of the tensors.
        planner: Says which tensors share a buffer.
        density: Density by step and epoch.
        dense_first: Average the first window as DDP does: costs are not known yet, and there is no residual to add.
            Otherwise what no plan covers is sent sparse.
        overlap: Launch buffers while gradients still arrive. Not where a tensor is submitted at different points of the
            backward pass on different ranks (unused on some): the collectives of the model's own backward
            (SyncBatchNorm) would meet ours in different orders.
        deferred: Read what the ranks say of their tensors one window late, so that the host never waits for the device.
            Only where every tensor gets a gradient on all ranks in every window.
        offload: Selects from some tensors on a thread of the host.
        ticks: Agreement on what is ready; only timer-driven fusion has it.

    Attributes:
        windows: Windows drained so far.
        epoch: For the density schedule; whoever trains sets it.
        loss_scale: Read at the first gradient of a window; None without a loss scaler.
        notices: What this rank tells all others in its next messages (bits of ``Notice``).
        heard: What some rank has told all others: the same on all ranks at the end of every window.
        report: The record of the latest window.
        clock: Of this rank's device.
        observers: Are told of every window.
        order_known: The layout has the order in which gradients arrive.
        unstepped: bool [L] by registration index: exchanged, and no optimizer has used it yet.
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
        self.transport: Transport = planner.transport
        self.density = density
        self._constant = density.density if isinstance(density, ConstantDensity) else None
        self.dense_first = dense_first
        self.overlap = overlap
        self.epoch = 0
        self.loss_scale: Callable[[], Tensor | None] | None = None
        self.windows = 0
        self.notices = 0
        self.heard = 0
        self.report: WindowRecord | None = None
        self.clock = clock_for(self.space.device)
        self.observers: list[Observer] = []
        self.order_known = False
        self.unstepped = np.zeros(len(space.layout), bool)
        self._tracked = np.zeros(len(space.layout), bool)  # of these an optimizer announces its steps
        self._unobserved: WindowRecord | None = None  # its times are not known yet
        self._timed: WindowEvents | None = None  # of the latest window that recorded everything
        self._first = True  # DDP's first window submits everything at its end, in an order that means nothing
        self._window: Window | None = None
        self._between = True  # no window is open, and the last one has ended: what exchanges have learnt is agreed
        # selection and packing run beside the backward pass
        self._lane = None if self.clock.instant else Lane(self.space.device)
        self._drain = Drain(space.memory, self.transport, space.device)
        self._device_drain = DeviceDrain(space.memory, Lane(space.device), space.device) if deferred else None
        self._offload = offload
        self.ticks = ticks
        self._overflow = OverflowGuard(space, self.transport)

    @property
    def complete(self) -> bool:
        """Whether every tensor of the open window has been pushed."""
        return self._window is not None and self._window.complete

    def missing(self) -> list[str]:
        """Names of the tensors that the open window still waits for; empty if none is open."""
        if self._window is None or self._window.complete:
            return []
        return self.space.layout.names(p for p, grad in enumerate(self._window.grads) if grad is None)

    def push(self, index: int, grad: Tensor, fresh: bool = True) -> bool:
        """Takes one gradient; launches the buffer that it completes.

        Args:
            index: Registration index of its parameter.
            grad: Flat gradient, any floating dtype; :meth:`drain` writes the mean over ranks into it.
            fresh: Whether it was computed since the last window. A stale tensor sends nothing, and if it is stale on
                all ranks it is left exactly as it is.

        Returns:
            Whether the window is complete now.
        """
        place = self.space.layout.places[index]
        window = self._window
        if window is not None and window.grads[place] is not None:
            self.reset()  # the last backward never finished, and the model is trained on: a new window begins
            window = None
        window = window or self._begin()
        group = window.submit(place, grad, fresh, fresh and bool(self.unstepped[index]))
        if self._offload is not None and self._offload.wants(place):
            with _HERE if self._lane is None else self._lane.fork():
                self._offload.offer(window, place, grad)
        if group is not None:
            self._launch(window, group)
        if self.ticks is not None and window.ticking:
            self._fuse(window, self.ticks.poll(window.ready))
        elif window.complete and not window.plain:
            self._launch_rest(window)
        return window.complete

    def _begin(self) -> Window:
        self.settle()
        if self._overflow.pending:
            self._overflow.mend(together=True)
        self._between = False
        density = self._constant if self._constant is not None else self.density(self.windows, self.epoch)
        if density != self.space.quotas.density:
            self.space.set_density(density)
            self.planner.invalidate()
        groups: Sequence[Group] = ()
        plain = self.dense_first and self.windows == 0
        if self.order_known and not plain:
            plan = self.planner.plan(self.space.shape)
            groups = plan.groups
            if self._offload is not None:
                self._offload.follow(plan, partial(self.planner.costs, self.space.shape))
        ticking = self.ticks is not None and bool(groups) and self.overlap
        if self.ticks is not None and ticking:
            self.ticks.begin()
            groups = ()
        regular = self.windows < _TIMED_WINDOWS or self.windows % _TIMED_EVERY == 0
        surveyed = regular or self.planner.wants_times
        timed = surveyed or bool(self.observers)
        mark = perf_counter if self.clock.instant else self.clock.mark if timed else unmarked
        scale = self.loss_scale() if self.loss_scale is not None else None
        # a copy: the scaler updates its factor in place
        scale = scale.detach().clone() if scale is not None else None
        self._window = Window(
            len(self.space.layout.specs),
            groups,
            self.windows,
            density,
            mark,
            surveyed=surveyed,
            timed=timed,
            ticking=ticking,
            hold=not self.overlap,
            # a scaler waits for the device anyway, and a tensor whose gradient was thrown away needs the host
            deferred=self._device_drain is not None and scale is None and not self.unstepped.any(),
            scale=scale,
            plain=plain,
        )
        return self._window

    def _launch(self, window: Window, group: Group) -> None:
        """Fills the buffer of a group and sends it; one that waits for the host leaves behind the next one."""
        with _HERE if self._lane is None else self._lane.fork():
            shipment = Shipment(self.space.pool.buffers.get(group) or self.space.buffer(group), window)
            if self._offload is None:
                shipment.fill(self.space.selector)
            else:
                shipment.fill(self.space.selector, *self._offload.taken(group))
            window.unsent.append(shipment)
            self._send(window, keep=int(self._offload is not None and self._offload.late))
        window.launched = group.stop

    def _send(self, window: Window, keep: int = 0) -> None:
        """Packs and launches the shipments that have been filled, all but the latest ``keep``."""
        while len(window.unsent) > keep:
            shipment = window.unsent.pop(0)
            shipment.pack(self.notices, self._offload.collect if self._offload is not None else None)
            shipment.launch()
            if self._device_drain is not None and window.deferred:
                self._device_drain.launched(shipment)
            window.shipments.append(shipment)

    def _fuse(self, window: Window, ready: int) -> None:
        """Launches what a tick has found ready on all ranks."""
        if ready > window.launched:
            for group in self.planner.fuse(self.space.shape, window.launched, ready):
                self._launch(window, group)

    def _launch_rest(self, window: Window) -> None:
        """Launches planned groups that gradients out of order have kept back; everything if nothing is planned."""
        for group in window.groups[window.next_group :]:
            self._launch(window, group)
        start, length = window.launched, window.length
        if start < length:
            collective: CollectiveName = self.planner.fallback(self.space.shape, sparse=not self.dense_first)
            while start < length:
                limit = self.space.layout.edges[start] + _UNPLANNED_ELEMENTS
                stop = max(start + 1, int(np.searchsorted(self.space.layout.edges, limit, side="right")) - 1)
                self._launch(window, Group(start, stop, collective))
                start = stop
        if window.unsent:
            with _HERE if self._lane is None else self._lane.fork():
                self._send(window)

    def drain(self) -> None:
        """Waits for all buffers, writes the means into the gradients, and commits the window if it ended well.

        Raises:
            RuntimeError: If a peer is lost (with the buffer's tensors), or a rank could not fill its message.
        """
        window = self._window
        if window is None or not window.complete:
            raise RuntimeError(f"drain needs a complete window; tensors not seen: {', '.join(self.missing()[:20])}")
        if self.ticks is not None and window.ticking:
            for ready in self.ticks.rest(window.length):
                self._fuse(window, ready)
            # the next window has other buffers
            self.space.pool.keep_only([shipment.buffer.group for shipment in window.shipments])
        self._window = None
        if self._offload is not None:
            self._offload.forget()  # what an error has left
        if self._lane is not None:
            self._lane.join()
        good = True  # until it is known better
        if window.plain:
            good = self._drain.average(window)
        elif self._device_drain is not None and window.deferred:
            self._device_drain.run(window)
            if window.error is not None:
                raise window.error
        else:
            good, notices = self._drain.run(window, self.space.layout)
            if notices:
                self._hear(window, notices)
            if not good:
                self._overflow.uncommitted()
                self._overflow.mend(together=True)
        if good:
            exchanged = self._exchanged(window)
            self.unstepped[exchanged] = self._tracked[exchanged]
        window.drained = window.mark()
        self._finish(window)

    def let_go(self) -> None:
        """Lets go of the gradients of the first window: DDP is about to make other buckets, in place of theirs."""
        if self.windows == 1 and self.report is not None:
            self.report.let_go()

    def settle(self) -> None:
        """Reads what the device decided of the last window, if the host does not know it yet.

        Raises:
            RuntimeError: If a rank could not fill its message, or some ranks had no gradient of a tensor.
        """
        outcome = self._device_drain.read() if self._device_drain is not None else None
        if outcome is not None:
            window, good, notices = outcome
            self._hear(window, notices)
            if not good:
                self.unstepped[self._exchanged(window)] = False
                self._overflow.uncommitted()
        if self._overflow.pending:
            self._overflow.mend(together=False)
        record, self._unobserved = self._unobserved, None
        if record is not None:
            self._observe(record)

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

    def _finish(self, window: Window) -> None:
        self._between = True
        window.planned = self.order_known and window.in_order
        self.report = WindowRecord(window, self.space, self.clock, self.transport.world_size, self._timed)
        if self.clock.instant:
            self._observe(self.report)
        else:
            self._unobserved = self.report
        if not window.in_order and not (self._first and self.order_known):
            self.adopt_order(window.order)
        self.order_known |= self.windows > 0 and not self._first
        self._first = False
        self.windows += 1

    def _observe(self, record: WindowRecord) -> None:
        """Hands the times of a window to the planner and to all observers."""
        if record.planned:
            # observers may differ between ranks: the planner, whose agreements are collective, does not look at them
            known = self.clock.instant or record.surveyed
            replans = self.planner.replans
            self.planner.observe(record.events if known else None, self.space.shape)
            self._forget_replaced(replans)
        if record.timed:
            self._timed = record.events
            for observer in self.observers:
                observer.observe(record.events)

    def adopt_order(self, order: list[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        self.space.reorder(order)
        self.planner.invalidate(order_changed=True)

    def step_aside(self) -> bool:
        """Whether plain DDP does the rest of the job: that was agreed, and no residual remains anywhere.

        If one does, as of a tensor that had no gradient while all were sent, the engine goes on. Collective once it
        was agreed; the answer is the same on all ranks.
        """
        if not self.planner.dense_for_good:
            return False
        held = any(bool(state.any()) for state in self.space.memory.state_dict().values())
        anywhere = torch.tensor([float(held)], device=self.space.device)
        self.transport.all_reduce(anywhere, "max").wait()
        if anywhere.item():
            replans = self.planner.replans
            self.planner.keep_engine(self.space.shape)
            self._forget_replaced(replans)
        return not anywhere.item()

    def use(self, plan: Plan) -> None:
        """Goes on with this plan, the same on all ranks, until costs call for another. Collective; between windows."""
        replans = self.planner.replans
        self.planner.use(plan, self.space.shape)
        self._forget_replaced(replans)

    def _forget_replaced(self, replans: int) -> None:
        """Forgets the buffers of a plan that another one has replaced since ``replans`` changes had been made."""
        if self.planner.replans != replans and self.planner.current is not None:
            self.space.pool.keep_only(self.planner.current.groups)

    def track(self, indices: Iterable[int]) -> None:
        """Announces that :meth:`stepped` will be called whenever these parameters (registration indices) are updated.

        Such a tensor, submitted again although nothing has stepped since, is sent dense and without its residual: the
        gradient that was exchanged before has been thrown away, and this one may be.
        """
        self._tracked[list(indices)] = True

    def stepped(self, indices: Iterable[int]) -> None:
        """Notes that an optimizer has used the gradients of these parameters (registration indices)."""
        self.unstepped[list(indices)] = False

    def reset(self) -> None:
        """Forgets an open window. Nothing is lost: what it had added to the residual stays there."""
        if self._offload is not None:
            self._offload.forget()
        if self._window is not None and self._lane is not None:
            self._lane.synchronize()
        self._window = self._unobserved = None
        if self._device_drain is not None:
            self._device_drain.forget()
        # an exchange that was abandoned may have learnt something on some ranks and not on others
        self.space.pool.load_state_dict(self.space.pool.state_dict() if self._between else [])
        self._between = True

    def release(self) -> None:
        """Frees buffers and figures; the state that a checkpoint wants stays."""
        self.reset()
        self.report = None
        self._drain.release()
        if self._offload is not None:
            self._offload.release()
        if self._device_drain is not None:
            self._device_drain.release()
        native.release()

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None while the order of the gradients is not known."""
        return self.planner.current
