"""What can be read from a strategy while it trains, and who is told of every window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Clock, Observer, clock_for
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.fusion.slowest import SlowestWorker
from lightning_safusion.integration.history import FitHistory


class EngineReadings(ABC):
    """Figures of a strategy's engine.

    Attributes:
        system: Name of the scheme.
        settings: Of the engine.
        cautions: What is known to cost accuracy in this fit, in sentences.
        log_figures: Log figures of the exchange.
    """

    system: str
    settings: EngineSettings
    cautions: tuple[str, ...]
    log_figures: bool
    root_device: torch.device
    _history: FitHistory
    _observers: list[Observer]  # of every engine

    @property
    @abstractmethod
    def engine(self) -> Engine | None:
        """The engine of this fit on this rank; None with plain DDP."""

    @cached_property
    def clock(self) -> Clock:
        """A clock of this rank's device; its seconds are those of observed events."""
        return clock_for(self.root_device)

    @abstractmethod
    def learned(self) -> Any:
        """What this fit has found out about the job, the same on all ranks: for :meth:`begin_with`, during training."""

    @abstractmethod
    def begin_with(self, learned: Any) -> None:
        """Lets the next fit begin with the plan and the costs of another one, without its residuals.

        Args:
            learned: What :meth:`learned` has returned in a fit of the same model, settings and workers.
        """

    @property
    @abstractmethod
    def _plain_ddp(self) -> str | None:
        """Why plain DDP is used; None if it is not."""

    def add_observer(self, observer: Observer) -> None:
        """Calls an observer after every window of this rank, in all fits from now on."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Ends :meth:`add_observer`; does nothing for other objects."""
        if observer in self._observers:
            self._observers.remove(observer)

    @property
    def record(self) -> WindowRecord | None:
        """What the latest window of this rank did; None with plain DDP and before the first."""
        return None if self.engine is None else self.engine.record

    @property
    def plan(self) -> Plan | None:
        """Which tensors share a buffer; None with plain DDP, and while the order of the gradients is not known."""
        return self.engine.planner.current if self.engine is not None else None

    @property
    def costs(self) -> GroupCosts | None:
        """What plans are made from, the same on all ranks; None with plain DDP."""
        engine = self.engine
        return engine.planner.costs(engine.space.shape) if engine is not None else None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The planner's latest decisions on buffer sizes, oldest first, the same on all ranks."""
        engine = self.engine
        return self._history.decisions + (() if engine is None else tuple(engine.planner.decisions))

    @property
    def slowest(self) -> SlowestWorker | None:
        """Times of all workers by the planner's latest review, and who is slow; None with plain DDP."""
        return None if self.engine is None else self.engine.planner.slowest

    def _log(self, module: LightningModule) -> None:
        """Logs figures of the latest window as the step itself logs, where Lightning writes what is logged."""
        trainer: Any = module.trainer
        record, every = self.record, trainer.log_every_n_steps
        if not self.log_figures or record is None or not every:
            return
        if (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every:
            return
        latest = record.as_dict()
        options: dict[str, Any] = {"on_step": True, "on_epoch": False, "batch_size": 1}  # no mean is made of values
        module.log("safusion/exposed_ms", latest["exposed_s"] * 1e3, prog_bar=True, **options)
        module.log("safusion/sent_mb", latest["bytes_sent"] / 1e6, **options)
        module.log("safusion/dense_mb", latest["dense_bytes"] / 1e6, **options)
        module.log("safusion/density", latest["achieved_density"], **options)

    def describe(self) -> dict[str, str]:
        """All settings as text."""
        return self.settings.describe()

    def figures(self) -> dict[str, Any]:
        """Figures of the latest step on this rank, under the keys of :meth:`WindowRecord.as_dict`.

        Also ``system``, ``windows`` (exchanged so far), ``replans``, ``plain_ddp``: why plain DDP is used, None if it
        is not; ``step_s`` and ``ddp_step_s``: seconds of a step (median of the latest), and under DDP by prediction,
        both None before the first review of the plan; ``slow_rank``, ``waiting_s``, ``slow_since``: the worker that is
        slow, the seconds of every step that the others wait for it, and since which step, the same on all ranks, all
        None if there is no such worker; ``last_engine_step``: number of the latest step that this package exchanged,
        None if there is none. Before the first step, and with plain DDP, the figures of a step are None and
        the lists empty. Where training runs in other processes (spawn, fork), ask there: in a callback.
        """
        if self._history.ended is not None:
            return self._history.ended
        of_job = {"system": self.system, "plain_ddp": self._plain_ddp}
        return of_job | self._history.figures(self.engine)
