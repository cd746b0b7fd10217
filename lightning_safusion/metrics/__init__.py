"""What sparsification does to every tensor, as metrics that add up over steps and ranks."""

from lightning_safusion.metrics.convergence import ConvergenceFigures
from lightning_safusion.metrics.figures import TensorFigures, tensor_figures
from lightning_safusion.metrics.history import MissingRateStatistics
from lightning_safusion.metrics.ratios import AchievedDensity, BytesSent, CompressionError, TensorMissingRate

__all__ = [
    "AchievedDensity",
    "BytesSent",
    "CompressionError",
    "ConvergenceFigures",
    "MissingRateStatistics",
    "TensorFigures",
    "TensorMissingRate",
    "tensor_figures",
]
