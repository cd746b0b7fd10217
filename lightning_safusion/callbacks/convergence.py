"""A callback that measures what convergence proofs assume of a compressor."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_safusion.callbacks.base import StepSampler
from lightning_safusion.metrics.convergence import ConvergenceFigures, by_index, convergence_figures
from lightning_safusion.strategy import SAFusionStrategy


class ConvergenceProbe(StepSampler[ConvergenceFigures]):
    """Measures, per tensor and over all, what convergence proofs assume of a compressor; for every system.

    ``x`` is what a rank selects from (gradient plus residual), ``C(x)`` what the receivers decode of it, ``g`` the
    gradient; means are over ranks. Figures of a sampled step, over all tensors that were sent sparse:

    =============================  ====================================================================================
    ``safusion/contraction``       ``||x - C(x)||^2 / ||x||^2``, energies summed over ranks. Error feedback converges
                                   if it stays below 1 (Stich et al., NeurIPS 2018); Top-k, and Top-k in every row
                                   (ADTopk), have at most one minus the density
    ``safusion/xi``                ``||C(mean x) - mean C(x)|| / ||mean g||``: the distance to what compression of the
                                   mean would have sent (Alistarh et al., NeurIPS 2018, assumption 1). It should
                                   stay bounded
    ``safusion/coverage``          share of the slices along a tensor's first dimension (output channels, words) of
                                   which a rank sent something, mean over ranks; of tensors with two dimensions or more
    =============================  ====================================================================================

    Each is also logged as ``<key>/<parameter>``. ``mean C(x)`` is the gradient that the optimizer gets. A sampled step
    waits for the device, copies the residual, reduces two vectors of the size of the model over the ranks, and selects
    once more with a copy of this rank's compressor; other steps cost nothing. With ``memory="dgc"`` and
    ``"decoupled"``, which hold a momentum, there is no ``xi``. With plain DDP nothing is sampled.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.
        per_tensor: Also log the figures of every tensor.

    Attributes:
        latest: The latest sample, summed over ranks; None before the first.

    Raises:
        ValueError: If ``every_n_steps`` is below 1.

    Example::

        probe = ConvergenceProbe(every_n_steps=100)
        Trainer(strategy=SAFusionStrategy(system="adtopk"), callbacks=[probe])
    """

    def __init__(self, every_n_steps: int = 100, per_tensor: bool = True) -> None:
        super().__init__(every_n_steps)
        self.per_tensor = per_tensor
        self.latest: ConvergenceFigures | None = None
        self._before: dict[int, Tensor] | None = None  # what error feedback held when the window began

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        controller = self._strategy(trainer).controller
        if self._sampling and controller is not None:
            self._before = by_index(controller.space.accumulated(), controller.space.layout)

    @override
    def _measure(self, strategy: SAFusionStrategy) -> ConvergenceFigures | None:
        before, self._before = self._before, None
        if strategy.record is None or before is None:
            return None
        return convergence_figures(strategy.record, before)

    @override
    def _values(self, figures: ConvergenceFigures, step: int) -> dict[str, float]:
        self.latest = figures
        return figures.values(self.per_tensor)
