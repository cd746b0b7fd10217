"""What callbacks have in common that work with this strategy only."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion.strategy import SAFusionStrategy


class StrategyCallback(Callback):
    """Looks at, or changes, what :class:`SAFusionStrategy` does."""

    _purpose: ClassVar[str]  # what it does to the strategy, for the message

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
