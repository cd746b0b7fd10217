"""Agreement of all ranks on what is ready, at ticks of a clock: the coordination of timer-driven fusion (Horovod)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.launching.planned import Launching
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.fusion.plans.plan import Group, Plan
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.space import GradientSpace
from lightning_safusion.fusion.window import Window


class _Question:
    """The minimum over ranks of how many tensors each has ready."""

    def __init__(self, transport: Transport, ready: int) -> None:
        self.answered = False  # set by a callback on any thread
        self._count = torch.tensor([ready], dtype=torch.int64)
        self._work = transport.all_reduce(self._count, "min")
        self._work.on_done(self._note)

    def _note(self, _: float) -> None:
        self.answered = True

    def answer(self) -> int:
        self._work.wait()
        return int(self._count.item())


@dataclass(eq=False)
class Ticks:
    """Asks all ranks what they have ready, whenever a cycle of this rank's clock has passed.

    Horovod's workers combine bit vectors of the tensors that each has queued. Here all ranks submit tensors in one
    order, so that the minimum of how many each has is ready everywhere. Clocks differ between ranks; the answers and
    their sequence do not. A rank with nothing new does not ask: the others' question waits for it.

    Questions are asked, and answers read, when a gradient arrives. A thread, which Horovod has, could also ask between
    two gradients, but would launch collectives beside those of the backward pass, and take the interpreter's lock.
    """

    transport: Transport  #: a communicator of its own for tensors in host memory: ranks ask at their own pace
    cycle: float  #: seconds from one tick to the next
    now: Callable[[], float] = perf_counter  #: this rank's clock, seconds
    pause: Callable[[float], None] = sleep  #: waits for so many seconds
    agreed: int = 0  #: tensors of this window that are ready on all ranks, by the last answer
    _question: _Question | None = None
    _due: float = 0.0

    def begin(self) -> None:
        """Begins a window. Ticks continue between windows: the first one is somewhere in the next cycle.

        Raises:
            RuntimeError: If the window before has not ended.
        """
        if self._question is not None or self.agreed > 0:
            raise RuntimeError(
                "the last backward pass did not finish, and with timer-driven fusion ranks may have sent different "
                "parts of it: training cannot go on. Start it again from a checkpoint, or use fusion='aligned', whose "
                "buffers are the same wherever a backward pass stops."
            )
        now = self.now()
        self._due = (math.floor(now / self.cycle) + 1) * self.cycle if self.cycle > 0 else now

    def poll(self, ready: int) -> int:
        """Asks if it is time, and reads the answer if there is one; returns :attr:`agreed`. Never waits.

        ``ready``: tensors that this rank has ready, rising from call to call.
        """
        if self._question is not None and self._question.answered:
            self._read(self._question)
        if self._question is None and ready > self.agreed and self.now() >= self._due:
            self._ask(ready)
        return self.agreed

    def rest(self, total: int) -> Iterator[int]:
        """Waits for the missing answers, after the backward pass: :attr:`agreed` after each, in the end ``total``.

        Raises:
            RuntimeError: If a rank is lost.
        """
        while self.agreed < total:
            try:
                if self._question is None:
                    self.pause(max(0.0, self._due - self.now()))
                self._read(self._question or self._ask(total))
            except Exception as error:
                raise RuntimeError(
                    f"rank {self.transport.rank}: the agreement on which tensors are ready on all ranks failed: {error}"
                ) from error
            yield self.agreed
        self.agreed = 0

    def _ask(self, ready: int) -> _Question:
        self._due = self.now() + self.cycle
        self._question = _Question(self.transport, ready)
        return self._question

    def _read(self, question: _Question) -> None:
        self.agreed, self._question = question.answer(), None


class Ticking(Launching):
    """Sends what all ranks have ready at ticks of a clock, fused by capacity."""

    asks_always = True

    def __init__(self, space: GradientSpace, planner: Planner, dense_first: bool, ticks: Ticks) -> None:
        super().__init__(space, planner, dense_first)
        self.ticks = ticks
        self._open = False  # the window goes by the clock, not by a plan

    def begin(self, plan: Plan) -> Sequence[Group]:
        if plan.groups:
            self.ticks.begin()
            self._open = True
        return ()

    def closing(self, window: Window, place: int, grad: Tensor, group: Group | None) -> Iterable[Group]:
        return self._fused(window, self.ticks.poll(window.ready)) if self._open else ()

    def rest(self, window: Window) -> Iterator[Group]:
        return iter(()) if self._open else super().rest(window)

    def late(self, window: Window) -> Iterator[Group]:
        if self._open:
            for ready in self.ticks.rest(window.length):
                yield from self._fused(window, ready)

    def ended(self, shipments: Sequence[Shipment]) -> None:
        if self._open:  # the next window has other buffers
            self.space.keep_only([shipment.buffer.group for shipment in shipments])
        self._open = False

    def forget(self) -> None:
        self._open = False

    def _fused(self, window: Window, ready: int) -> Iterable[Group]:
        if ready <= window.launched:
            return ()
        return self.planner.fuse(self.space.shape, window.launched, ready)
