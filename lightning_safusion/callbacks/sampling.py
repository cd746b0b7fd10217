"""What callbacks have in common that look at the windows of every n-th optimizer step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_safusion.callbacks.base import StrategyCallback
from lightning_safusion.metrics.figures import latest_window
from lightning_safusion.strategy import SAFusionStrategy


class StepSampler(StrategyCallback):
    """Takes in all windows of the batch that ends with every n-th optimizer step, on all ranks, and logs values of it.

    Other steps cost nothing. With plain DDP there are no windows: that is said once.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.

    Raises:
        ValueError: If ``every_n_steps`` is below 1.
    """

    _purpose = "samples"

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._next = 0  # step of the next sample
        self._started = 0  # step at which this batch began
        self._stride = 1  # optimizer steps in a batch
        self._sampling = False
        self._window: int | None = None  # the latest that was looked at
        self._said = False  # that plain DDP is used

    @abstractmethod
    def _forget(self) -> None:
        """A batch begins: what was taken in of the one before is not wanted any more."""

    @abstractmethod
    def _take(self, strategy: SAFusionStrategy) -> None:
        """Takes in the window that has just ended; on all ranks."""

    @abstractmethod
    def _values(self, trainer: Trainer, step: int) -> dict[str, float] | None:
        """What the windows of this batch say, on all ranks; None if none was taken in.

        Args:
            trainer: The trainer.
            step: Batches that have stepped, as Lightning's own values are logged.
        """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._strategy(trainer)
        self._said = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    def _plan(self, trainer: Trainer) -> None:
        self._next = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._forget()
        self._started = trainer.global_step
        self._sampling = self._started >= self._next - self._stride
        self._window = latest_window(self._strategy(trainer))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # every window of the batch: optimizers that take turns have windows of different tensors
        if not self._sampling:
            return
        window = latest_window(self._strategy(trainer))
        if window == self._window:
            return  # gradients are being accumulated
        self._window = window
        self._take(self._strategy(trainer))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stride = max(self._stride, trainer.global_step - self._started)
        if not self._sampling:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        values = self._values(trainer, step)
        if values is None:
            self._say_aside(self._strategy(trainer))
            return
        self._plan(trainer)
        for logger in trainer.loggers:
            logger.log_metrics({f"safusion/{key}": value for key, value in values.items()}, step=step)

    def _say_aside(self, strategy: SAFusionStrategy) -> None:
        if self._said or latest_window(strategy) is not None:
            return
        self._said = True
        reason = strategy.report()["plain_ddp"]
        if reason is not None:
            rank_zero_info(
                f"{type(self).__name__} samples nothing from here on: plain DDP sends every tensor whole ({reason})."
            )
