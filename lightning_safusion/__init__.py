"""SAFusion for PyTorch Lightning: gradients are sparsified before they are fused."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_safusion.__about__ import __version__
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import SYSTEMS, System

# Lightning has no entry points for strategies: the names exist once this package is imported.
SAFusionStrategy.register_strategies(StrategyRegistry)

__all__ = ["SYSTEMS", "SAFusionStrategy", "System", "__version__"]
