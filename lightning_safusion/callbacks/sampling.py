"""What callbacks have in common that look at the windows of every n-th optimizer step."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, Generic, TypeVar

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_safusion.callbacks.base import StrategyCallback, check_every
from lightning_safusion.metrics.figures import TensorSums
from lightning_safusion.strategy import SAFusionStrategy

_F = TypeVar("_F", bound=TensorSums)


class StepSampler(StrategyCallback, Generic[_F]):
    """Takes in all windows of the batch that ends with every n-th optimizer step, on all ranks, and logs values of it.

    Other steps cost nothing. With plain DDP there are no windows: that is said once.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.

    Raises:
        ValueError: If ``every_n_steps`` is below 1.
    """

    _purpose = "samples"

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = check_every(every_n_steps)
        self._next = 0  # step of the next sample
        self._started = 0  # step at which this batch began
        self._stride = 1  # optimizer steps in a batch
        self._sampling = False
        self._figures: _F | None = None  # of the windows of this batch
        self._window: int | None = None  # the latest that was looked at

    @abstractmethod
    def _measure(self, strategy: SAFusionStrategy) -> _F | None:
        """Figures of the window that has just ended, on all ranks; None if there are none."""

    @abstractmethod
    def _values(self, figures: _F, step: int) -> dict[str, float]:
        """What is logged, on all ranks.

        Args:
            figures: Of all windows of this batch, summed over ranks.
            step: Batches that have stepped, as Lightning's own values are logged.
        """

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
        if not self._sampling:
            return
        window = _latest_window(self._strategy(trainer))
        if window == self._window:
            return  # gradients are being accumulated
        self._window = window
        figures = self._measure(self._strategy(trainer))
        if figures is not None:
            self._figures = figures if self._figures is None else self._figures + figures

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stride = max(self._stride, trainer.global_step - self._started)
        if not self._sampling:
            return
        if self._figures is not None:
            figures = self._figures.reduced(partial(trainer.strategy.reduce, reduce_op="sum"))
            self._plan(trainer)
            self._log(trainer, self._values(figures, trainer.fit_loop.epoch_loop._batches_that_stepped))
            return
        strategy = self._strategy(trainer)
        reason = None if self._said or _latest_window(strategy) is not None else strategy.report()["plain_ddp"]
        if reason is not None:
            self._say(f"samples nothing from here on: plain DDP sends every tensor dense ({reason})")


def _latest_window(strategy: SAFusionStrategy) -> int | None:
    """Number of the latest window, the same on all ranks; None with plain DDP and before the first."""
    return None if strategy.record is None else strategy.record.step
