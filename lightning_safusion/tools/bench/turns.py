"""A turn of one row: a fresh trainer fits the user's module from its first weights, for a few steps that are timed."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

from lightning_safusion.integration.model_parallel import SAFusionModelParallelStrategy
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.integration.units import is_schedule_free
from lightning_safusion.literal import literal
from lightning_safusion.tools.bench.beginning import Beginning, begin_peak, give_back, nothing, peak
from lightning_safusion.tools.bench.job import Job, JobOptions, keeps
from lightning_safusion.tools.bench.meeting import Meeting, wait_for
from lightning_safusion.tools.bench.results import Turned

_EPOCHS = 1000  # a turn ends by itself; schedules of the learning rate may want a number
_BATCHES_PER_STEP = 1000  # a training whose batches make no step would never end
_TRIAL = 24  # more steps of warm-up, if a plan is on trial when it ends


class _SilentLogger(DummyLogger):
    """Writes nothing; a module that asks where it would write gets a folder that goes with the benchmark."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return self._folder

    @property
    def log_dir(self) -> str:
        return self._folder


class TurnProgress(Progress):
    """Shows which turn is under way, and its steps: a bar on a terminal, else a line for each turn."""

    def __init__(self, console: Console, turns: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        hidden = console.quiet or not console.is_terminal
        # refreshed by hand: a thread of its own would be forked with workers that load data
        super().__init__(*columns, console=console, auto_refresh=False, transient=True, disable=hidden)
        self._what, self._steps = "", 0
        self._turns = self.add_task("", total=turns)

    def begin(self, what: str) -> None:
        """A turn begins."""
        self._what, self._steps = what, -1
        self.step()

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        steps = f", step {self._steps}" if self._steps else ""
        self.update(self._turns, description=escape(self._what) + steps, refresh=True)

    def end(self, seconds: float | None) -> None:
        """A turn has ended; ``seconds``: its median step, None where none counts."""
        self.update(self._turns, advance=1, refresh=True)
        if self.disable:
            ended = "ended" if seconds is None else f"{seconds * 1e3:.3g} ms per step"
            self.console.print(literal(f"{self._what}: {ended}"))


class _Timing(Callback):
    """Times the steps of a turn, and ends it. All processes begin a step together, when their batches are loaded."""

    def __init__(self, bench: Bench, warmup: int, steps: int, tick: Callable[[], None]) -> None:
        self.turned = Turned()
        self.learned: Any = None
        self.stopped = False
        self._bench, self._tick = bench, tick
        self._warmup, self._wanted, self._most = warmup, steps, warmup + _TRIAL
        self._done = self._batches = self._global_step = 0
        self._step = self._load = self._begin = 0.0
        self._samples: list[int | None] = []  # of the batches of a step
        self._ended = perf_counter()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bench.beginning.restore(trainer)
        # The user's limits were there for schedules that ask for them. Schedules would end before the turn, or want a
        # metric of the validation; a step takes as long without.
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = _EPOCHS, -1
        if pl_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        self.turned.optimizers = [
            "schedule-free " * is_schedule_free(each) + type(each).__name__ for each in trainer.optimizers
        ]
        if isinstance(trainer.strategy, EngineReadings):
            self.turned.cautions = list(trainer.strategy.cautions)
            self.turned.density = trainer.strategy.settings.density.lasting()
            trainer.strategy.settings.density.opens = False  # later steps are judged

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step, self._ended = trainer.global_step, perf_counter()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        wait_for(self._bench.meeting.device)  # the batch is there
        self._load += perf_counter() - self._ended
        # between two steps of the optimizer, or gradients of an accumulation would stay behind
        if self._step == 0 and self._bench.meeting.any(self._bench.stops()):
            self.stopped = trainer.should_stop = True
        self._begin = perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wait_for(self._bench.meeting.device)
        self._ended = perf_counter()
        self._step += self._ended - self._begin
        self._batches += 1
        self._samples.append(_samples_of(batch))
        if trainer.global_step == self._global_step:
            if self._batches > _BATCHES_PER_STEP * (self._done + 1):
                raise RuntimeError(f"no optimizer has stepped in {self._batches} batches")
            return
        self._global_step = trainer.global_step
        self._done += 1
        waits = self._warmup <= self._done < self._most and not self.turned.steps
        if waits and self._bench.meeting.any(_on_trial(trainer)):
            self._warmup = self._done + 1
        if self._done > self._warmup:
            self.turned.steps.append(self._step)
            self.turned.loading.append(self._load)
        known = [each for each in self._samples if each is not None]
        self.turned.samples = sum(known) if len(known) == len(self._samples) else None
        self._step, self._load, self._samples = 0.0, 0.0, []
        self._tick()
        if self._done >= self._warmup + self._wanted:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.turned.peak_bytes = peak(self._bench.meeting.device)
        if isinstance(trainer.strategy, EngineReadings):
            self.turned.figures = trainer.strategy.figures()
            self.learned = trainer.strategy.learned()


def _samples_of(batch: Any) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:
            return None


def _on_trial(trainer: Trainer) -> bool:
    engine = trainer.strategy.engine if isinstance(trainer.strategy, EngineReadings) else None
    return engine is not None and engine.planner.on_trial


class Bench:
    """The user's model and data, built once, and what has been learned of each row. ``stops`` says whether the user
    wants to stop."""

    def __init__(self, job: Job, meeting: Meeting, options: JobOptions, stops: Callable[[], bool]) -> None:
        self.module, self.data = job.build()
        self.meeting, self.stops, self._job, self._seed = meeting, stops, job, options.seed
        self.beginning = Beginning(self.module, self.data)
        self._folder = tempfile.mkdtemp(prefix="safusion-bench-")
        self._learned: dict[str, Any] = {}
        self._mesh: Any = None
        configure = self.module.configure_callbacks

        def kept() -> list[Callback]:
            given = configure()
            several = given if isinstance(given, Sequence) else [given]
            return [each for each in several if keeps(type(each), options.keep_callbacks)]

        self.module.configure_callbacks = kept  # type: ignore[method-assign]

    def turn(
        self,
        row: str,
        strategy: Strategy,
        warmup: int,
        steps: int,
        tick: Callable[[], None],
        *more: Callback,
        accumulated: bool = True,
    ) -> _Timing:
        """Trains a row for some steps. Collective; memory of the row is given back before it returns, or raises.

        Args:
            row: Its name: what it has learned in its turn before, it knows.
            strategy: A new one.
            warmup: Steps that do not count.
            steps: Steps that do, with the one before them.
            tick: Called after every step.
            more: Other callbacks.
            accumulated: Batches are accumulated as the user's trainer says; False: every batch makes a step.
        """
        device = self.meeting.device
        give_back(device)
        begin_peak(device)
        if isinstance(strategy, EngineReadings) and row in self._learned:
            strategy.begin_with(self._learned[row])
        if isinstance(strategy, SAFusionModelParallelStrategy):
            strategy._device_mesh = self._mesh  # the model lies on that of the first turn
        timing = _Timing(self, warmup, steps, tick)
        callbacks = [*copy.deepcopy(self._job.callbacks), *more, timing]
        arguments = self._job.trainer | ({} if accumulated else {"accumulate_grad_batches": 1})
        try:
            self._fit(strategy, callbacks, arguments)
        finally:
            if isinstance(strategy, SAFusionModelParallelStrategy):
                self._mesh = strategy._device_mesh
                for each in strategy.attached:
                    each.close()
            self._forget()
        if timing.learned is not None:
            self._learned[row] = timing.learned
        return timing

    def _fit(self, strategy: Strategy, callbacks: list[Callback], arguments: Mapping[str, Any]) -> None:
        # the same batches, and the same noise of dropout, in every turn
        seed = self._seed + self.meeting.rank
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)
        self.beginning.unfreeze()
        endless = arguments.get("max_epochs") is None and arguments.get("max_steps", -1) == -1
        trainer = Trainer(
            **{**arguments, **({"max_epochs": _EPOCHS} if endless else {})},
            strategy=strategy,
            callbacks=callbacks,
            logger=_SilentLogger(self._folder),
            default_root_dir=self._folder,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.save_checkpoint = nothing  # type: ignore[method-assign]  # a hook of the module may call it
        trainer.fit(self.module, datamodule=self.data)
        self.beginning.done()

    def close(self) -> None:
        """Ends the job, whose data may want to be taken down."""
        self.beginning.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _forget(self) -> None:
        self.module.trainer = None
        self.module.zero_grad(set_to_none=True)
        if self.data is not None:
            self.data.trainer = None
        give_back(self.meeting.device)
