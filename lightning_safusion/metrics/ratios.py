"""Metrics of TorchMetrics, overall and by tensor: every state is one tensor, so that all ranks agree in one gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_safusion.metrics.figures import TensorFigures


class _TensorRatio(Metric):
    """A ratio of two sums over windows and ranks.

    Args:
        names: Parameter names, the same on all ranks; names of parameters that never have a gradient are allowed.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If a name comes twice.
    """

    is_differentiable = False
    higher_is_better: bool | None = None
    full_state_update = False
    sums: Tensor

    _terms: ClassVar[tuple[str, str]]  # numerator and denominator, properties of TensorFigures

    def __init__(self, names: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names = tuple(names)
        self._rows = {name: row for row, name in enumerate(self.names)}
        if len(self._rows) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise ValueError(f"names has {', '.join(twice)} more than once: give every parameter once")
        self.add_state("sums", torch.zeros(2, len(self.names), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, figures: TensorFigures) -> None:
        """Adds a window.

        Args:
            figures: Of this rank, or already summed over ranks (with ``sync_on_compute=False`` then).

        Raises:
            ValueError: If it has a tensor that the metric does not know.
        """
        unknown = [name for name in figures.names if name not in self._rows]
        if unknown:
            raise ValueError(
                f"{len(unknown)} tensors ({', '.join(unknown[:8])}) are not among this metric's {len(self.names)} "
                "names: make it with [name for name, _ in module.named_parameters()]"
            )
        rows = torch.tensor([self._rows[name] for name in figures.names], device=self.device)
        terms = torch.stack([getattr(figures, term) for term in self._terms])
        self.sums = self.sums.index_add(1, rows, terms.to(self.device))

    @override
    def compute(self) -> Tensor:
        """The ratio of the sums over all tensors; NaN if there were none."""
        part, whole = self.sums.sum(1)
        return part / whole

    def per_tensor(self) -> dict[str, float]:
        """The ratio of each tensor that was ever exchanged, in the order of the names. A collective."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            sums = self.sums.cpu()
        parts, wholes = sums.tolist()
        return {name: p / w for name, p, w in zip(self.names, parts, wholes, strict=True) if w > 0}


class TensorMissingRate(_TensorRatio):
    """Share of the exchanged gradients of which no element was sent (SAFusion, observation 1).

    A gradient is one tensor in one window on one rank. Sparsification before fusion leaves no tensor out. After fusion,
    tensors whose elements are small beside those of their neighbours in the buffer are missing.

    Args:
        names: Parameter names, the same on all ranks.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Example::

        self.missing = TensorMissingRate([name for name, _ in self.named_parameters()])

        def on_after_backward(self):
            if (figures := tensor_figures(self.trainer.strategy, errors=False)) is not None:
                self.missing.update(figures)
    """

    higher_is_better = False
    _terms = ("missing", "windows")


class AchievedDensity(_TensorRatio):
    """Share of the gradients' elements that was sent, including dense tensors.

    Args:
        names: Parameter names, the same on all ranks.
        kwargs: Options of :class:`torchmetrics.Metric`.
    """

    _terms = ("sent", "elements")


class CompressionError(_TensorRatio):
    r"""Share of the energy that was not sent, ``||x - C(x)||^2 / ||x||^2``: one minus the contraction of ``C``.

    ``x`` is what was selected from (gradient plus residual; the velocity of DGC), ``C(x)`` what the receivers decoded,
    rounding on the wire included. Top-k sends at least its density of the energy (Stich et al. 2018): the error is at
    most one minus the density. Only tensors that were sent sparse count.

    Args:
        names: Parameter names, the same on all ranks.
        kwargs: Options of :class:`torchmetrics.Metric`.
    """

    higher_is_better = False
    _terms = ("error", "energy")


class BytesSent(Metric):
    """Mean bytes that a rank gives to the collectives in a window."""

    is_differentiable = False
    higher_is_better: bool | None = False
    full_state_update = False
    sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(3, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, report: Mapping[str, Any]) -> None:
        """Adds a window.

        Args:
            report: What :meth:`SAFusionStrategy.report` returns.
        """
        figures = [1, report["bytes_sent"], report["dense_bytes"]]
        self.sums = self.sums + torch.tensor(figures, device=self.device)

    @override
    def compute(self) -> Tensor:
        """Bytes per window and rank; NaN before the first."""
        return self.sums[1] / self.sums[0]

    def ratio(self) -> float:
        """Bytes of the gradients themselves over the bytes sent; NaN if none were sent. A collective."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            _, sent, dense = self.sums.tolist()
        return dense / sent if sent else float("nan")
