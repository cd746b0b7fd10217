"""The part of the strategy that tells what happens: observers, the plan and its costs, figures of a step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_safusion.fusion.clock import Clock, clock_for
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Observer
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.record import WindowRecord, nothing_exchanged
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.resumable import ResumableDDPStrategy


class ObservedDDPStrategy(ResumableDDPStrategy):
    """DDP whose engine can be watched from outside, also where there is none.

    Args:
        kwargs: Arguments of DDPStrategy.
    """

    system: str

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._observers: list[Observer] = []  # of every controller of this strategy
        self._aside: str | None = None  # why plain DDP is used
        self._last_report: dict[str, Any] | None = None  # of a fit that has ended
        self._plain_clock: Clock | None = None  # where no engine has one
        self._decided: tuple[Decision, ...] = ()  # by engines of this fit that are gone
        self._counted = {"windows": 0, "replans": 0}  # theirs

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._last_report, self._decided, self._counted = None, (), {"windows": 0, "replans": 0}
        super().setup(trainer)

    def _remember(self, controller: Engine) -> None:
        """Keeps what is told of an engine that another one, or plain DDP, takes the place of."""
        self._decided += tuple(controller.planner.decisions)
        replans = self._counted["replans"] + controller.planner.replans
        self._counted = {"windows": controller.windows, "replans": replans}

    def add_observer(self, observer: Observer) -> None:
        """Has an observer told of every backward window of this rank, in all fits from now on."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Ends that; nothing happens if it is none."""
        if observer in self._observers:
            self._observers.remove(observer)

    @property
    def controller(self) -> Engine | None:
        """The engine of this fit on this rank, for metrics and callbacks that read it; None with plain DDP.

        It may be another one after the model has been wrapped anew: ask for it whenever it is needed.
        """
        return self._controller

    @property
    def record(self) -> WindowRecord | None:
        """What the latest window of this rank did; None with plain DDP and before the first."""
        return None if self._controller is None else self._controller.report

    @property
    def clock(self) -> Clock:
        """The clock of this rank's device, whose moments agree with those that observers are told."""
        if self._controller is not None:
            return self._controller.clock
        if self._plain_clock is None:
            self._plain_clock = clock_for(self.root_device)
        return self._plain_clock

    @property
    def plan(self) -> Plan | None:
        """Which tensors share a buffer; None with plain DDP, and while the order of the gradients is not known."""
        return self._controller.plan if self._controller is not None else None

    @property
    def costs(self) -> GroupCosts | None:
        """What plans are made from, the same on all ranks; None with plain DDP."""
        controller = self._controller
        return controller.planner.costs(controller.space.shape) if controller is not None else None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The planner's latest decisions on buffer sizes, oldest first, the same on all ranks."""
        return self._decided + (tuple(self._controller.planner.decisions) if self._controller is not None else ())

    def report(self) -> dict[str, Any]:
        """Figures of the latest step on this rank, under the keys of :meth:`WindowRecord.as_dict`.

        Also ``system``, ``windows`` (exchanged so far), ``replans`` and ``plain_ddp``: why plain DDP is used, None if
        it is not. Before the first step, and with plain DDP, the figures of a step are 0 and the lists empty. Where
        training runs in other processes (spawn, fork), ask there: in a callback.
        """
        if self._last_report is not None:
            return self._last_report
        figures: dict[str, Any] = {"system": self.system, "plain_ddp": self._aside, **self._counted}
        controller = self._controller
        if controller is None:
            return figures | nothing_exchanged()
        figures |= {"windows": controller.windows, "replans": figures["replans"] + controller.planner.replans}
        return figures | (controller.report.as_dict() if controller.report is not None else nothing_exchanged())
