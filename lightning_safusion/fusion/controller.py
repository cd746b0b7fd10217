"""The Controller: takes gradients in, launches full buffers, drains them, gives the means back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, Verdict, all_finite, saturated
from lightning_safusion.comm.transport import Transport
from lightning_safusion.fusion.generator import FusionBuffer, Generator, unscaled
from lightning_safusion.fusion.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.report import WindowReport
from lightning_safusion.fusion.window import BufferTimes, Window
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule, check_density

# The end of a collective is told by a callback on the backend's thread, which stops the backward's for the
# interpreter's lock: taken down in every window at first, then in one of 16.
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
        dense_first: Send the first window dense: costs are not known yet, and there is no residual to add.
        overlap: Launch buffers while gradients still arrive. Not where a tensor is submitted at different points of the
            backward pass on different ranks (unused on some): the collectives of the model's own backward
            (SyncBatchNorm) would meet ours in different orders.
    """

    def __init__(
        self,
        generator: Generator,
        planner: Planner,
        transport: Transport,
        density: DensitySchedule,
        dense_first: bool = True,
        overlap: bool = True,
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
        self.order_known = False  # the layout has the order in which gradients arrive
        self.unstepped = np.zeros(len(generator.layout), bool)  # exchanged, not yet used; by registration index
        self._tracked = np.zeros(len(generator.layout), bool)  # the same for what an optimizer announces
        self._first = True  # DDP's first window submits everything at its end, in an order that means nothing
        self._window: Window | None = None
        self._scratch = torch.zeros(0, device=generator.device)
        self._warned = False

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
        if group is not None:
            self._launch(window, group)
        if window.complete:
            self._launch_rest(window)

    def _begin(self) -> Window:
        density = check_density(self.density(self.windows, self.epoch))
        if self.generator.set_density(density):
            self.planner.invalidate()
        groups: Sequence[Group] = ()
        if self.order_known and not self._dense_window():
            groups = self.planner.plan(self.generator).groups
        timed = self.windows < _TIMED_WINDOWS or self.windows % _TIMED_EVERY == 0
        scale = self.loss_scale() if self.loss_scale is not None else None
        # a copy: the scaler updates its factor in place
        scale = scale.detach().clone() if scale is not None else None
        self._window = Window(len(self.generator.layout), groups, self.windows, density, timed, not self.overlap, scale)
        return self._window

    def _dense_window(self) -> bool:
        return self.dense_first and self.windows == 0

    def _launch(self, window: Window, group: Group) -> None:
        buffer = self.generator.buffer(group)
        times = BufferTimes(closed=perf_counter())
        part = slice(group.start, group.stop)
        self._merge(window, buffer, part)
        try:
            buffer.exchange.start()
        except Exception as error:
            raise self._lost(buffer, error) from error
        times.launched = perf_counter()
        if buffer.exchange.work is not None and window.timed:
            buffer.exchange.work.on_done(times.finish)
        window.inflight.append((buffer, times))
        window.launched = group.stop

    def _merge(self, window: Window, buffer: FusionBuffer, part: slice) -> None:
        """Fills a buffer; a rank that cannot still takes part, so that no other rank waits for it for ever."""
        if window.error is not None:
            self.generator.leave_empty(buffer, self.notices)
            return
        try:
            self.generator.merge(
                buffer,
                window.grads_of(buffer.group),
                window.fresh[part],
                window.raw[part],
                window.step,
                window.scale,
                self.notices,
            )
        except Exception as error:
            window.error = error
            self.generator.leave_empty(buffer, self.notices)

    def _launch_rest(self, window: Window) -> None:
        """Launches planned groups that gradients out of order have kept back; everything if nothing is planned."""
        for group in window.groups[window.next_group :]:
            self._launch(window, group)
        edges = self.generator.layout.edges
        collective: CollectiveName = "allreduce" if self._dense_window() else self.planner.fallback(self.generator)
        start = window.launched
        while start < len(self.generator.layout):
            limit = edges[start] + _UNPLANNED_ELEMENTS
            stop = max(start + 1, int(np.searchsorted(edges, limit, side="right")) - 1)
            self._launch(window, Group(start, stop, collective))
            start = stop

    def drain(self) -> None:
        """Waits for all buffers, writes the means into the gradients, and commits the window if it ended well.

        Raises:
            RuntimeError: If a peer is lost (with the buffer's tensors), or a rank could not fill its message.
        """
        window = self._window
        if window is None or not window.complete:
            raise RuntimeError(f"drain needs a complete window; tensors not seen: {', '.join(self.missing()[:20])}")
        self._window = None
        repairs: list[int] = []
        good = self._forgets_skipped(window)
        errors: list[tuple[int, int, Tensor]] = []
        for buffer, times in window.inflight:
            verdict = self._receive(window, buffer, times, errors)
            self.heard |= verdict.notices
            good &= verdict.finite and not verdict.bad.any()
            repairs += [
                buffer.group.start + int(t) for t in np.flatnonzero(verdict.irregular(self.transport.world_size))
            ]
        self.notices &= ~self.heard
        if self.heard & Notice.FAILED:
            self.heard &= ~Notice.FAILED
            raise window.error or RuntimeError(
                "another rank could not select its gradients in this step; see that rank's own error"
            )
        if self._repair(window, repairs) and good:
            self._commit(window, repairs, errors)
        self._finish(window)

    def _forgets_skipped(self, window: Window) -> bool:
        """Under a loss scaler, takes the gradients of a step that it will skip out of the memory again; else True.

        DDP throws such a step away. Kept, the gradients of several skipped steps (scalers begin with some) would reach
        the optimizer at once. What was held back before stays, sent or not.
        """
        if window.scale is None:
            return True
        for buffer, _ in window.inflight:
            self._wait(buffer)
        if not any(buffer.exchange.verdict().bad.any() for buffer, _ in window.inflight):
            return True
        for place in np.flatnonzero(window.fresh & ~window.raw).tolist():
            grad = window.grads_of(Group(place, place + 1))[0]
            if all_finite(grad):  # what is not was never added
                self.generator.memory.withdraw(place, unscaled([grad], window.scale)[0])
        window.raw |= window.fresh  # nothing of them is left to withdraw
        return False

    def _wait(self, buffer: FusionBuffer) -> None:
        try:
            buffer.exchange.wait()
        except Exception as error:
            raise self._lost(buffer, error) from error

    def _receive(
        self, window: Window, buffer: FusionBuffer, times: BufferTimes, errors: list[tuple[int, int, Tensor]]
    ) -> Verdict:
        begin = perf_counter()
        self._wait(buffer)
        arrived = perf_counter()
        size = buffer.stop - buffer.start
        if len(self._scratch) < size:
            self._scratch = torch.zeros(size, device=self._scratch.device)
        scratch = self._scratch[:size]
        mean, verdict = buffer.exchange.decode(scratch)
        self._deliver(window, buffer, mean, verdict, errors)
        buffer.exchange.release(scratch)
        times.waited, times.decoded = arrived - begin, perf_counter() - arrived
        return verdict

    def _deliver(
        self,
        window: Window,
        buffer: FusionBuffer,
        mean: Tensor,
        verdict: Verdict,
        errors: list[tuple[int, int, Tensor]],
    ) -> None:
        """Copies the mean into the gradients; notes what narrow ones cannot hold, which goes back into the
        residuals."""
        means, targets = list(mean.split(buffer.sizes)), window.grads_of(buffer.group)
        places = list(range(len(targets)))
        if not verdict.is_regular(self.transport.world_size):
            regular = (verdict.fresh > 0) & ~verdict.irregular(self.transport.world_size)
            places = np.flatnonzero(regular).tolist()
            means, targets = [means[t] for t in places], [targets[t] for t in places]
        if not places:
            return
        if window.scale is not None:
            means = list(torch._foreach_mul(means, window.scale))
        if not buffer.narrow:
            torch._foreach_copy_(targets, means)
            return
        torch._foreach_copy_(targets, [saturated(m, g.dtype) for m, g in zip(means, targets, strict=True)])
        edges = buffer.exchange.spec.edges
        for t, exact, held in zip(places, means, targets, strict=True):
            if held.itemsize < mean.itemsize:
                error = exact - held if window.scale is None else unscaled([exact - held], window.scale)[0]
                errors.append((buffer.start + edges[t], buffer.start + edges[t + 1], error))

    def _repair(self, window: Window, places: Sequence[int]) -> bool:
        """Averages gradients as DDP does, outside the compressed path, in place; their residuals stay as they were.

        Returns:
            Whether they are finite.
        """
        if not places:
            return True
        if not self._warned and self.transport.rank == 0:
            self._warned = True
            names = self.generator.layout.names(places)
            warnings.warn(
                f"{len(names)} tensors ({', '.join(names[:3])}, ...) were computed on some ranks only, or computed "
                "again before their optimizer stepped; such gradients travel dense. Use "
                "toggle_optimizer/untoggle_optimizer in manual "
                "optimization to keep them out of backward passes whose gradients are thrown away.",
                stacklevel=2,
            )
        grads = [window.grads_of(Group(place, place + 1))[0] for place in places]
        works = []
        for place, grad in zip(places, grads, strict=True):
            # what is not finite was never added
            if window.fresh[place] and not window.raw[place] and all_finite(grad):
                added = grad if window.scale is None else unscaled([grad], window.scale)[0]
                self.generator.memory.withdraw(place, added)
            grad.mul_(1.0 / self.transport.world_size)
            works.append(self.transport.all_reduce(grad))
        for work in works:
            work.wait()
        return all(map(all_finite, grads))

    def _commit(self, window: Window, repairs: Sequence[int], errors: Iterable[tuple[int, int, Tensor]]) -> None:
        for buffer, _ in window.inflight:
            withdrawn = [p - buffer.group.start for p in repairs if p in buffer.places and not window.raw[p]]
            self.generator.commit(buffer, withdrawn)
        for start, stop, error in errors:
            self.generator.memory.add(start, stop, error)
        exchanged = [self.generator.layout.specs[p].index for p in np.flatnonzero(window.fresh)]
        self.unstepped[exchanged] = self._tracked[exchanged]

    def _finish(self, window: Window) -> None:
        self.report = WindowReport.of(window, self.generator, self.report)
        if self.order_known and window.in_order:
            self.planner.observe(window, self.generator)
        if not window.in_order and not (self._first and self.order_known):
            self.adopt_order(window.order)
        self.order_known |= self.windows > 0 and not self._first
        self._first = False
        self.windows += 1

    def adopt_order(self, order: list[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        layout = self.generator.layout.reordered(order)
        self.generator.memory.permute(order, layout.edges.tolist())
        self.generator.set_layout(layout)
        self.planner.invalidate(order_changed=True)

    def can_step_aside(self) -> bool:
        """Whether plain DDP would do the rest of the job as well: dense for good, and nothing is held back anywhere.

        Collective once every buffer is dense for good; the answer is the same on all ranks.
        """
        memory = self.generator.memory
        settled = isinstance(self.density, ConstantDensity) and memory.name in ("residual", "none")
        if not (settled and self.planner.dense_for_good):
            return False
        held = torch.tensor([float(any(bool(state.any()) for state in memory.state_dict().values()))])
        held = held.to(self.generator.device)
        self.transport.all_reduce(held, "max").wait()
        return not bool(held.item())

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
        self._window = None
        self.generator.forget()

    def release(self) -> None:
        """Frees buffers and figures; the state that a checkpoint wants stays."""
        self.reset()
        self.report = None
        self._scratch = self._scratch[:0].clone()

    def current_plan(self) -> Plan | None:
        """The plan in use; None while the order of the gradients is not known."""
        return self.planner.current

    def _lost(self, buffer: FusionBuffer, error: Exception) -> RuntimeError:
        names = self.generator.layout.names(buffer.places)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return RuntimeError(
            f"rank {self.transport.rank}: the exchange of the buffer with {shown} failed in step {self.windows}: "
            f"{error}"
        )
