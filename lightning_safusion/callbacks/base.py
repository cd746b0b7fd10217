"""What callbacks share: access to the strategy, sampling of steps, files of a run, tables on a terminal."""

from __future__ import annotations

import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import StringIO
from math import isnan
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import rich
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console, RenderableType
from torch import nn
from typing_extensions import override

from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.metrics.figures import TensorSums

_F = TypeVar("_F", bound=TensorSums)

_BEGUN: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()  # by wrapped model, which every fit makes anew


class StrategyCallback(Callback):
    """Reads or configures a strategy of this package; refuses other strategies."""

    _purpose: ClassVar[str]  # the verb of the error message for another strategy
    _serves: ClassVar[type[Any]] = EngineReadings
    _said = False  # the reason why there is nothing to show was logged in this fit

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._said = False
            self._begin(self._strategy(trainer), trainer, pl_module)

    def _begin(self, strategy: EngineReadings, trainer: Trainer, module: LightningModule) -> None:
        """Resets the state of an earlier fit."""

    def _strategy(self, trainer: Trainer) -> EngineReadings:
        if isinstance(trainer.strategy, self._serves):
            return trainer.strategy
        raise MisconfigurationException(
            f"{type(self).__name__} {self._purpose} SAFusionStrategy, got {type(trainer.strategy).__name__}: pass "
            "Trainer(strategy=SAFusionStrategy(...)) or leave the callback out."
        )

    def _log(self, trainer: Trainer, values: Mapping[str, float | None], step: int | None = None) -> None:
        """Logs ``safusion/<key>`` and the epoch to every logger, without None and NaN: such a figure was not measured.

        By default at the step of Lightning's own values.
        """
        if step is None:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
        measured = {key: float(value) for key, value in values.items() if value is not None}
        known = {f"safusion/{key}": value for key, value in measured.items() if not isnan(value)}
        for logger in trainer.loggers if known else ():
            logger.log_metrics(known | {"epoch": trainer.current_epoch}, step=step)

    def _say(self, text: str) -> None:
        """Logs on rank 0, once in a fit, why there is nothing to show."""
        if not self._said:
            self._said = True
            rank_zero_info(f"{type(self).__name__} {text}.")


class StepSampler(StrategyCallback, Generic[_F]):
    """Logs figures of all windows in the batch that ends with every n-th optimizer step, summed over ranks.

    Other steps cost nothing. With plain DDP there are no windows, which is logged once.

    Args:
        every_n_steps: Optimizer steps from one sample to the next, at least 1.
    """

    _purpose = "samples"

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = check_every(every_n_steps)
        self._next = 0  # step of the next sample
        self._started = 0  # step at which this batch began
        self._stride = 1  # optimizer steps in a batch
        self._sampling = False
        self._figures: _F | None = None  # of the windows of this batch
        self._window: int | None = None  # number of the latest window that was measured

    @abstractmethod
    def _measure(self, strategy: EngineReadings) -> _F | None:
        """Figures of the window that has just ended, on all ranks; None if there are none."""

    @abstractmethod
    def _values(self, figures: _F, step: int) -> dict[str, float]:
        """What is logged, on all ranks, of all windows of a batch; ``step``: at which Lightning logs its own values."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    def _plan(self, trainer: Trainer) -> None:
        self._next = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._figures = None
        self._started = trainer.global_step
        self._sampling = self._started >= self._next - self._stride
        self._window = _latest_window(self._strategy(trainer))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # every window of the batch: optimizers that take turns have windows of different tensors
        strategy = self._strategy(trainer)
        if not self._sampling or _latest_window(strategy) == self._window:  # without a new one, gradients accumulate
            return
        self._window = _latest_window(strategy)
        figures = self._measure(strategy)
        if figures is not None:
            self._figures = figures if self._figures is None else self._figures + figures

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = self._strategy(trainer)
        self._stride = max(self._stride, trainer.global_step - self._started)
        if self._figures is not None:
            figures = self._figures.reduced(partial(trainer.strategy.reduce, reduce_op="sum"))
            self._plan(trainer)
            self._log(trainer, self._values(figures, trainer.fit_loop.epoch_loop._batches_that_stepped))
        elif self._sampling and not self._said and _latest_window(strategy) is None:
            reason = strategy.figures()["plain_ddp"]
            if reason is not None:
                self._say(f"samples nothing from here on: plain DDP sends every tensor dense ({reason})")


def _latest_window(strategy: EngineReadings) -> int | None:
    """Number of the latest window, the same on all ranks; None with plain DDP and before the first."""
    return None if strategy.record is None else strategy.record.step


def check_every(every_n_steps: int) -> int:
    """The number; raises if it is no whole one, or below 1."""
    if every_n_steps < 1 or every_n_steps != int(every_n_steps):
        raise ValueError(f"every_n_steps must be a whole number, 1 or more, got {every_n_steps}")
    return every_n_steps


def run_directory(trainer: Trainer, dirpath: str | Path | None) -> Path:
    """``dirpath``, or ``safusion`` in the first logger's directory or the ``default_root_dir``. A collective."""
    folder = trainer.log_dir or trainer.default_root_dir  # a collective
    return Path(folder) / "safusion" if dirpath is None else Path(dirpath)


def run_id(trainer: Trainer) -> float:
    """Seconds since 1970 when this fit began, by rank 0's clock: the same for all callbacks and ranks. A collective."""
    model = trainer.strategy.model
    if model is None:
        raise RuntimeError("a run is named when training begins: there is no model yet")
    if model not in _BEGUN:
        _BEGUN[model] = float(trainer.strategy.broadcast(time.time()))
    return _BEGUN[model]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns errors of writing files into a warning: a full disk must not end the training."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"nothing was written to {folder} ({error}): choose a directory with room", stacklevel=4)


def print_table(trainer: Trainer, table: RenderableType) -> None:
    """Prints on rank 0, above a progress bar that is being drawn."""
    if not trainer.is_global_zero:
        return
    bar, console = trainer.progress_bar_callback, rich.get_console()
    if isinstance(bar, TQDMProgressBar) and trainer.training and bar.is_enabled:
        text = StringIO()
        Console(file=text, width=console.width).print(table)
        bar.print(text.getvalue())
    else:
        console.print(table)
