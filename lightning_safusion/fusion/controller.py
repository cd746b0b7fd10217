"""The Controller: takes gradients in, has full buffers launched, drains them, gives the means back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightning_safusion import native
from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport import Transport, during
from lightning_safusion.fusion.clock import clock_for
from lightning_safusion.fusion.deferred import DeferredDrain
from lightning_safusion.fusion.drain import Drain
from lightning_safusion.fusion.events import Observer, WindowEvents
from lightning_safusion.fusion.generator import Generator
from lightning_safusion.fusion.lane import Lane
from lightning_safusion.fusion.launch import Launcher
from lightning_safusion.fusion.offload import Offloader
from lightning_safusion.fusion.overflow import OverflowGuard
from lightning_safusion.fusion.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.report import WindowReport
from lightning_safusion.fusion.ticks import Ticks
from lightning_safusion.fusion.window import Window, unmarked
from lightning_safusion.sparsify.schedule import DensitySchedule, check_density

# The end of a collective is told by a callback on the backend's thread, which stops the backward's for the
# interpreter's lock: taken down in every window at first, then in one of 16 and whenever the planner needs it.
_TIMED_WINDOWS, _TIMED_EVERY = 64, 16

# Until the order of the gradients is known everything leaves at the end, in pieces that bound the memory of a buffer.
_UNPLANNED_ELEMENTS = 1 << 25


class Controller:
    """Runs backward windows: :meth:`push` every gradient, then :meth:`drain`.

    Every rank must push the same tensors in the same order (DDP's bucket order does), which makes every decision here
    the same on all ranks: nothing depends on a local count or clock.

    Args:
        generator: Fills the buffers.
        planner: Says which tensors share a buffer.
        transport: Communicator of the buffers.
        density: Density by step and epoch.
        dense_first: Average the first window as DDP does: costs are not known yet, and there is no residual to add.
            Otherwise what no plan covers travels sparse.
        overlap: Launch buffers while gradients still arrive. Not where a tensor is submitted at different points of the
            backward pass on different ranks (unused on some): the collectives of the model's own backward
            (SyncBatchNorm) would meet ours in different orders.
        deferred: Read what the ranks say of their tensors one window late, so that the host never waits for the device.
            Only where every tensor gets a gradient on all ranks in every window.
        offload: Selects from some tensors on a thread of the host.
        ticks: Agreement on what is ready; only timer-driven fusion has it.
    """

    def __init__(
        self,
        generator: Generator,
        planner: Planner,
        transport: Transport,
        density: DensitySchedule,
        dense_first: bool = True,
        overlap: bool = True,
        deferred: bool = False,
        offload: Offloader | None = None,
        ticks: Ticks | None = None,
    ) -> None:
        self.generator = generator
        self.planner = planner
        self.transport = transport
        self.density = density
        self.dense_first = dense_first
        self.overlap = overlap
        self.epoch = 0
        self.loss_scale: Callable[[], Tensor | None] | None = None  # read at the first gradient of a window
        self.windows = 0
        self.notices = 0  # what this rank tells all others in its next messages (bits of Notice)
        self.heard = 0  # what some rank has told all others: the same on all ranks at the end of every window
        self.report: WindowReport | None = None
        self.clock = clock_for(generator.device)
        self.observers: list[Observer] = []
        self._unobserved: WindowReport | None = None  # its times are not known yet
        self._timed: WindowEvents | None = None  # of the latest window that took everything down
        self.order_known = False  # the layout has the order in which gradients arrive
        self.unstepped = np.zeros(len(generator.layout), bool)  # exchanged, not yet used; by registration index
        self._tracked = np.zeros(len(generator.layout), bool)  # the same for what an optimizer announces
        self._first = True  # DDP's first window submits everything at its end, in an order that means nothing
        self._window: Window | None = None
        self._between = True  # no window is open, and the last one has ended: what exchanges have learnt is agreed
        self._drain = Drain(generator, transport)
        self._deferred = DeferredDrain(generator, Lane(generator.device)) if deferred else None
        self._offload = offload
        self._launcher = Launcher(generator, transport, self._deferred, offload)
        self._ticks = ticks
        self._overflow = OverflowGuard(generator, transport)

    @property
    def complete(self) -> bool:
        """Whether every tensor of the open window has been pushed."""
        return self._window is not None and self._window.complete

    def missing(self) -> list[str]:
        """Names of the tensors that the open window still waits for; empty if none is open."""
        if self._window is None or self._window.complete:
            return []
        return self.generator.layout.names(p for p, grad in enumerate(self._window.grads) if grad is None)

    def push(self, index: int, grad: Tensor, fresh: bool = True) -> None:
        """Takes one gradient; launches the buffer that it completes.

        Args:
            index: Registration index of its parameter.
            grad: Flat gradient, any floating dtype; :meth:`drain` writes the mean over ranks into it.
            fresh: Whether it was computed since the last window. A stale tensor sends nothing, and if it is stale on
                all ranks it is left exactly as it is.
        """
        place = self.generator.layout.places[index]
        if self._window is not None and self._window.grads[place] is not None:
            self.reset()  # the last backward never finished, and the model is trained on: a new window begins
        window = self._window or self._begin()
        group = window.submit(place, grad, fresh, fresh and bool(self.unstepped[index]))
        self._launcher.offer(window, place, grad)
        if group is not None:
            self._launcher.launch(window, group, self.notices)
        if self._ticks is not None and window.ticking:
            self._fuse(window, self._ticks.poll(window.ready))
        elif window.complete and not window.plain:
            self._launch_rest(window)

    def _begin(self) -> Window:
        self.settle()
        self._overflow.mend(together=True)
        self._between = False
        density = check_density(self.density(self.windows, self.epoch))
        if self.generator.set_density(density):
            self.planner.invalidate()
        groups: Sequence[Group] = ()
        plain = self.dense_first and self.windows == 0
        if self.order_known and not plain:
            with during(f"step {self.windows}, when workers agree on a plan"):
                plan = self.planner.plan(self.generator)
            groups = plan.groups
            if self._offload is not None:
                self._offload.follow(plan, partial(self.planner.costs, self.generator))
        ticking = self._ticks is not None and bool(groups) and self.overlap
        if self._ticks is not None and ticking:
            self._ticks.begin()
            groups = ()
        regular = self.windows < _TIMED_WINDOWS or self.windows % _TIMED_EVERY == 0
        surveyed = regular or self.planner.wants_times
        timed = surveyed or bool(self.observers)
        mark = self.clock.mark if timed or self.clock.instant else unmarked
        scale = self.loss_scale() if self.loss_scale is not None else None
        # a copy: the scaler updates its factor in place
        scale = scale.detach().clone() if scale is not None else None
        # a scaler waits for the device anyway, and a tensor whose gradient was thrown away needs the host
        deferred = self._deferred is not None and scale is None and not self.unstepped.any()
        self._window = Window(
            len(self.generator.layout),
            groups,
            self.windows,
            density,
            mark,
            surveyed=surveyed,
            timed=timed,
            ticking=ticking,
            hold=not self.overlap,
            deferred=deferred,
            scale=scale,
            plain=plain,
        )
        return self._window

    def _fuse(self, window: Window, ready: int) -> None:
        """Launches what a tick has found ready on all ranks."""
        if ready > window.launched:
            for group in self.planner.fuse(self.generator, window.launched, ready):
                self._launcher.launch(window, group, self.notices)

    def _launch_rest(self, window: Window) -> None:
        """Launches planned groups that gradients out of order have kept back; everything if nothing is planned."""
        for group in window.groups[window.next_group :]:
            self._launcher.launch(window, group, self.notices)
        edges, start = self.generator.layout.edges, window.launched
        collective: CollectiveName = "allgather"
        if start < len(self.generator.layout):
            collective = self.planner.fallback(self.generator, sparse=not self.dense_first)
        while start < len(self.generator.layout):
            limit = edges[start] + _UNPLANNED_ELEMENTS
            stop = max(start + 1, int(np.searchsorted(edges, limit, side="right")) - 1)
            self._launcher.launch(window, Group(start, stop, collective), self.notices)
            start = stop
        self._launcher.flush(window, self.notices)

    def drain(self) -> None:
        """Waits for all buffers, writes the means into the gradients, and commits the window if it ended well.

        Raises:
            RuntimeError: If a peer is lost (with the buffer's tensors), or a rank could not fill its message.
        """
        window = self._window
        if window is None or not window.complete:
            raise RuntimeError(f"drain needs a complete window; tensors not seen: {', '.join(self.missing()[:20])}")
        if self._ticks is not None and window.ticking:
            for ready in self._ticks.rest(window.length):
                self._fuse(window, ready)
            # the next window has other buffers
            self.generator.pool.keep_only([buffer.group for buffer, _ in window.inflight])
        self._window = None
        if self._offload is not None:
            self._offload.forget()  # what an error has left
        self._launcher.lane.join()
        good = True  # until it is known better
        if window.plain:
            good = self._drain.average(window)
        elif self._deferred is not None and window.deferred:
            self._deferred.run(window)
            if window.error is not None:
                raise window.error
        else:
            good, notices = self._drain.run(window)
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
            self.report.window.let_go()

    def settle(self) -> None:
        """Reads what the device decided of the last window, if the host does not know it yet.

        Raises:
            RuntimeError: If a rank could not fill its message, or some ranks had no gradient of a tensor.
        """
        outcome = self._deferred.read() if self._deferred is not None else None
        if outcome is not None:
            window, good, notices = outcome
            self._hear(window, notices)
            if not good:
                self.unstepped[self._exchanged(window)] = False
                self._overflow.uncommitted()
        self._overflow.mend(together=False)
        report, self._unobserved = self._unobserved, None
        if report is not None:
            self._observe(report)

    def _hear(self, window: Window, notices: int) -> None:
        self.heard |= notices
        self.notices &= ~self.heard
        if self.heard & Notice.FAILED:
            self.heard &= ~Notice.FAILED
            raise window.error or RuntimeError(
                "another rank could not select its gradients in this step; see that rank's own error"
            )

    def _exchanged(self, window: Window) -> list[int]:
        """Registration indices of the tensors whose gradients a window has exchanged."""
        return [self.generator.layout.specs[place].index for place in np.flatnonzero(window.fresh)]

    def _finish(self, window: Window) -> None:
        self._between = True
        self.report = WindowReport(window, self.generator, self.clock, self._timed)
        window.planned = self.order_known and window.in_order
        if self.clock.instant:
            self._observe(self.report)
        else:
            self._unobserved = self.report
        if not window.in_order and not (self._first and self.order_known):
            self.adopt_order(window.order)
        self.order_known |= self.windows > 0 and not self._first
        self._first = False
        self.windows += 1

    def _observe(self, report: WindowReport) -> None:
        """Hands the times of a window to the planner and to all observers."""
        window = report.window
        if window.planned:
            # observers may differ between ranks: the planner, whose agreements are collective, does not look at them
            known = self.clock.instant or window.surveyed
            self.planner.observe(report.events if known else None, self.generator)
        if window.timed:
            self._timed = report.events
            for observer in self.observers:
                observer.observe(report.events)

    def adopt_order(self, order: list[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        layout = self.generator.layout.reordered(order)
        self.generator.memory.permute(order, layout.edges.tolist())
        self.generator.set_layout(layout)
        self.planner.invalidate(order_changed=True)

    def step_aside(self) -> bool:
        """Whether plain DDP does the rest of the job: that was agreed, and nothing is held back anywhere.

        If something is, as of a tensor that had no gradient while all were sent, the engine goes on. Collective once it
        was agreed; the answer is the same on all ranks.
        """
        if not self.planner.dense_for_good:
            return False
        held = any(bool(state.any()) for state in self.generator.memory.state_dict().values())
        anywhere = torch.tensor([float(held)], device=self.generator.device)
        self.transport.all_reduce(anywhere, "max").wait()
        if anywhere.item():
            self.planner.go_on(self.generator)
        return not anywhere.item()

    def track(self, indices: Iterable[int]) -> None:
        """Announces that :meth:`stepped` will be called whenever these parameters (registration indices) are updated.

        Such a tensor, submitted again although nothing has stepped since, travels dense and without its residual: the
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
        if self._window is not None:
            self._launcher.lane.synchronize()
        self._window = self._unobserved = None
        if self._deferred is not None:
            self._deferred.forget()
        pool = self.generator.pool
        # an exchange that was abandoned may have learnt something on some ranks and not on others
        pool.load_state_dict(pool.state_dict() if self._between else [])
        self._between = True

    def release(self) -> None:
        """Frees buffers and figures; the state that a checkpoint wants stays."""
        self.reset()
        self.report = None
        self._drain.release()
        if self._offload is not None:
            self._offload.release()
        if self._deferred is not None:
            self._deferred.release()
        native.release()

    def current_plan(self) -> Plan | None:
        """The plan in use; None while the order of the gradients is not known."""
        return self.planner.current
