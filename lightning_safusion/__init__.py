"""SAFusion for PyTorch Lightning: gradients are sparsified before they are fused."""

from typing import TYPE_CHECKING, NoReturn

from lightning_safusion.__about__ import __version__
from lightning_safusion.comm.transport.interface import DamagedMessageError, WorkerLostError
from lightning_safusion.comm.transport.lockstep import OutOfStepError
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.cadence import Cadence
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, FusionPolicy, Naive, Single
from lightning_safusion.fusion.plans.selective import Selective
from lightning_safusion.integration.attach import attach
from lightning_safusion.integration.attached import Attached
from lightning_safusion.sparsify import (
    DGC,
    ADTopk,
    AutoMemory,
    ConstantDensity,
    DecoupledMomentum,
    DenseStart,
    DensitySchedule,
    DGCMemory,
    DGCWarmup,
    EF21Memory,
    ExponentialRamp,
    GaussianK,
    LinearRamp,
    Memory,
    NoCompression,
    NoMemory,
    OkTopk,
    RandomK,
    RedSync,
    ResidualMemory,
    Segments,
    Selection,
    SIDCo,
    SpanSurvey,
    Sparsifier,
    Threshold,
    TopK,
    as_selection,
    segmented_view,
)
from lightning_safusion.systems import SYSTEMS, System

_MISSING = ""
try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError as error:  # loops of plain PyTorch go without
    _MISSING = f"{error}"
else:
    from lightning_safusion.callbacks import (
        BufferSizeTuner,
        OverlapProfiler,
        ReplicaConsistencyCheck,
        TensorMissingRateMonitor,
        TraceRecorder,
    )
    from lightning_safusion.integration.fabric import SAFusionFabricStrategy
    from lightning_safusion.integration.model_parallel import SAFusionModelParallelStrategy
    from lightning_safusion.strategy import SAFusionStrategy

    # Lightning has no entry points for strategies: the names exist once this package is imported.
    SAFusionStrategy.register_strategies(StrategyRegistry)
    SAFusionModelParallelStrategy.register_strategies(StrategyRegistry)
    SAFusionFabricStrategy.register_strategies(STRATEGY_REGISTRY)

__all__ = [
    "DGC",
    "SYSTEMS",
    "WFBP",
    "ADTopk",
    "Adaptive",
    "Aligned",
    "Attached",
    "AutoMemory",
    "BufferSizeTuner",
    "Cadence",
    "ConstantDensity",
    "DGCMemory",
    "DGCWarmup",
    "DamagedMessageError",
    "DecoupledMomentum",
    "DenseStart",
    "EF21Memory",
    "DensitySchedule",
    "ExponentialRamp",
    "FusionPolicy",
    "GaussianK",
    "LinearRamp",
    "Memory",
    "Naive",
    "NoCompression",
    "NoMemory",
    "OkTopk",
    "OutOfStepError",
    "OverlapProfiler",
    "RandomK",
    "RedSync",
    "ReplicaConsistencyCheck",
    "ResidualMemory",
    "SAFusionFabricStrategy",
    "SAFusionModelParallelStrategy",
    "SAFusionStrategy",
    "SIDCo",
    "Single",
    "Segments",
    "Selective",
    "Selection",
    "SpanSurvey",
    "Sparsifier",
    "System",
    "TensorMissingRateMonitor",
    "Threshold",
    "TopK",
    "TraceRecorder",
    "WorkerLostError",
    "__version__",
    "as_selection",
    "attach",
    "segmented_view",
]

if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every attribute

    def __getattr__(name: str) -> NoReturn:
        """Names the alternatives: a misspelt ``class_path`` shows this message and nothing else."""
        if _MISSING and name in __all__:
            raise ImportError(f"lightning_safusion.{name} needs Lightning, which cannot be imported: {_MISSING}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
