"""What windows did to every tensor: figures of one window, and metrics of TorchMetrics that add them up.

Every state of a metric is one tensor, so that all ranks agree in one gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import Self, override

if TYPE_CHECKING:
    from lightning_safusion.fusion.record import WindowRecord
    from lightning_safusion.integration.readings import EngineReadings


@dataclass(frozen=True, eq=False)
class TensorSums:
    """Sums over windows, and over ranks where they have been reduced, for each of T tensors.

    Float64 holds every count below 2^53 exactly, so that one reduction carries counts and energies.
    """

    names: tuple[str, ...]  # parameter names, in registration order
    sums: Tensor  # float64 [rows, T]

    def __add__(self, other: Self) -> Self:
        if self.names != other.names:
            raise ValueError(
                f"figures of {len(self.names)} and {len(other.names)} different tensors cannot be added: add those of "
                "windows between which no parameter was frozen or unfrozen"
            )
        return type(self)(self.names, self.sums + other.sums)

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> Self:
        """The sum over ranks: one reduction of 8 bytes per row and tensor.

        Args:
            reduce: Sums a tensor over ranks, and may do so in place; every rank must call it.
        """
        return type(self)(self.names, reduce(self.sums.clone()))


class TensorFigures(TensorSums):
    """What was sent of each tensor: six sums, float64 [6, T], which the properties name."""

    @property
    def windows(self) -> Tensor:
        """[T] windows in which the tensor had a gradient that was exchanged as planned."""
        return self.sums[0]

    @property
    def missing(self) -> Tensor:
        """[T] windows of these in which none of its elements was sent."""
        return self.sums[1]

    @property
    def elements(self) -> Tensor:
        """[T] elements that it had in these windows."""
        return self.sums[2]

    @property
    def sent(self) -> Tensor:
        """[T] elements of these that were sent."""
        return self.sums[3]

    @property
    def energy(self) -> Tensor:
        """[T] sum of ``||x||^2``, where ``x`` is what was selected from; 0 in windows in which it was dense."""
        return self.sums[4]

    @property
    def error(self) -> Tensor:
        """[T] sum of ``||x - C(x)||^2``, where ``C(x)`` is what the receivers decoded."""
        return self.sums[5]

    def everywhere(self) -> TensorFigures:
        """For figures of one window, reduced over ranks: one window per tensor, missing if no rank sent anything."""
        some = self.windows > 0
        sums = torch.zeros_like(self.sums)
        sums[0], sums[1] = some, some & (self.missing == self.windows)
        return TensorFigures(self.names, sums)


def tensor_figures(strategy: EngineReadings, errors: bool = True) -> TensorFigures | None:
    """Figures of this rank's latest window; call it between two windows (in ``on_after_backward``, for example).

    Not counted (0 windows) are tensors without a gradient or without elements, tensors whose gradient was averaged
    outside the compressed path, and the whole window if some gradient was not finite.

    Waits for the device. All ranks get the same names.

    Args:
        strategy: The trainer's strategy.
        errors: Also fill ``energy`` and ``error``: one pass over the elements of the model.

    Returns:
        On the strategy's device; None with plain DDP and before the first window.
    """
    return None if strategy.record is None else window_figures(strategy.record, errors)


def window_figures(record: WindowRecord, errors: bool = True) -> TensorFigures:
    """:func:`tensor_figures` of the record of a window."""
    layout, sent = record.layout, record.sent_counts
    sizes = np.diff(layout.edges)
    chosen = record.used & (sizes > 0)
    sums = np.zeros((6, len(layout)), np.float64)
    sums[:4] = chosen, chosen & (sent == 0), chosen * sizes, chosen * sent
    if errors:
        sums[4:] = np.where(chosen & ~record.dense, _energies(record), 0.0)
    order = [layout.places[index] for index in sorted(layout.places)]
    return TensorFigures(tuple(layout.names(order)), torch.from_numpy(sums[:, order]).to(record.device))


def _energies(record: WindowRecord) -> np.ndarray:
    """float64 [2, L]: ``||x||^2`` and ``||x - C(x)||^2`` of every tensor that was sent sparse.

    The memory holds ``r = x - C(x)`` once a window has been committed, hence ``||x||^2 = ||r||^2 + 2 <r, C(x)> +
    ||C(x)||^2``. Without error feedback it holds ``x`` until the next window, hence ``||x - C(x)||^2 = ||x||^2 -
    2 <x, C(x)> + ||C(x)||^2``. ``C(x)`` has few elements: only the first term reads all of them.
    """
    indices, values = record.sent()
    if not len(indices):
        return np.zeros((2, len(record.layout)))
    held = record.accumulated()
    tensors = list(held.split(np.diff(record.layout.edges).tolist()))
    squares = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square()
    values = values.double()
    cross = values * (values + (-2 if record.decay == 0 else 2) * held[indices].double())
    edges = torch.from_numpy(record.layout.edges).to(held.device)
    # right: an empty tensor has the edge of its successor, and owns no element
    places = torch.searchsorted(edges, indices, right=True) - 1
    other = squares.index_add(0, places, cross).clamp_(min=0)  # rounding may leave a negative zero
    return torch.stack([squares, other] if record.decay == 0 else [other, squares]).cpu().numpy()


class _TensorRatio(Metric):
    """A ratio of two sums over windows and ranks, overall and by tensor.

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
        rows = torch.tensor([self._rows[name] for name in figures.names], dtype=torch.int64, device=self.device)
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

    Example::

        self.missing = TensorMissingRate([name for name, _ in self.named_parameters()])

        def on_after_backward(self):
            if (figures := tensor_figures(self.trainer.strategy, errors=False)) is not None:
                self.missing.update(figures)
    """

    higher_is_better = False
    _terms = ("missing", "windows")


class AchievedDensity(_TensorRatio):
    """Share of the gradients' elements that was sent, including dense tensors."""

    _terms = ("sent", "elements")


class CompressionError(_TensorRatio):
    r"""Share of the energy that was not sent, ``||x - C(x)||^2 / ||x||^2``: one minus the contraction of ``C``.

    ``x`` is what was selected from (gradient plus residual; the velocity of DGC), ``C(x)`` what the receivers decoded,
    rounding on the wire included. Top-k sends at least its density of the energy (Stich et al. 2018): the error is at
    most one minus the density. Only tensors that were sent sparse count.
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
        self.sums = self.sums + torch.tensor(figures, dtype=torch.int64, device=self.device)

    @override
    def compute(self) -> Tensor:
        """Bytes per window and rank; NaN before the first."""
        return self.sums[1] / self.sums[0]

    def ratio(self) -> float:
        """Bytes of the gradients themselves over the bytes sent; NaN if none were sent. A collective."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            _, sent, dense = self.sums.tolist()
        return dense / sent if sent else float("nan")
