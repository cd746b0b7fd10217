"""What sparsification does to every tensor, as metrics that add up over steps and ranks."""

from lightning_safusion.metrics.figures import (
    AchievedDensity,
    BytesSent,
    CompressionError,
    TensorFigures,
    TensorMissingRate,
    tensor_figures,
)
from lightning_safusion.metrics.history import MissingRateStatistics

__all__ = [
    "AchievedDensity",
    "BytesSent",
    "CompressionError",
    "MissingRateStatistics",
    "TensorFigures",
    "TensorMissingRate",
    "tensor_figures",
]
