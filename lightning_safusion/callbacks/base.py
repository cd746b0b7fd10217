"""What callbacks have in common that work with this strategy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_safusion.strategy import SAFusionStrategy


class StrategyCallback(Callback):
    """Looks at, or changes, what :class:`SAFusionStrategy` does."""

    _purpose: ClassVar[str]  # what it does to the strategy, for the message
    _said = False  # why there is nothing to see in this fit

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._said = False
            self._begin(self._strategy(trainer), trainer, pl_module)

    def _begin(self, strategy: SAFusionStrategy, trainer: Trainer, module: LightningModule) -> None:
        """A fit begins: what an earlier one has left is forgotten."""

    def _strategy(self, trainer: Trainer) -> SAFusionStrategy:
        """The trainer's strategy.

        Raises:
            MisconfigurationException: If it is another one.
        """
        if isinstance(trainer.strategy, SAFusionStrategy):
            return trainer.strategy
        raise MisconfigurationException(
            f"{type(self).__name__} {self._purpose} SAFusionStrategy, got {type(trainer.strategy).__name__}: pass "
            "Trainer(strategy=SAFusionStrategy(...)) or leave the callback out."
        )

    def _log(self, trainer: Trainer, values: Mapping[str, float | None], step: int | None = None) -> None:
        """Logs what is not None to every logger, as ``safusion/<key>``; at the step of Lightning's own values."""
        if step is None:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
        known = {f"safusion/{key}": float(value) for key, value in values.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(known, step=step)

    def _say(self, text: str) -> None:
        """Says on rank 0, once in a fit, why there is nothing to see."""
        if not self._said:
            self._said = True
            rank_zero_info(f"{type(self).__name__} {text}.")


def check_every(every_n_steps: int) -> int:
    """The number.

    Raises:
        ValueError: If it is below 1.
    """
    if every_n_steps < 1:
        raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}")
    return every_n_steps
