"""Statistics of missing tensors over a training: sums by tensor, and missing rates over steps in a bounded table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from lightning_safusion.metrics.figures import AchievedDensity, CompressionError, TensorFigures, TensorMissingRate

_METRICS = ("missing", "everywhere", "density", "error")  # attributes of the statistics, keys of their state


@dataclass(frozen=True)
class TensorRow:
    """The statistics of one tensor."""

    name: str
    missing: float  # share of its gradients of which no element was sent
    everywhere: float  # share of the sampled windows in which no rank sent any of its elements
    density: float  # share of its elements that was sent
    error: float | None  # share of its energy that was not sent; None if it was always dense
    rates: tuple[float | None, ...]  # its missing rate by column of the heat map; None where it had no gradient


class MissingRateStatistics:
    """Sums of figures that were reduced over ranks; independent of trainers.

    Args:
        names: Parameter names.
        columns: Columns of the heat map, an even number; two neighbours are merged whenever it is full.

    Attributes:
        steps: The first of each column.

    Raises:
        ValueError: If ``columns`` is odd or below 2.
    """

    def __init__(self, names: Sequence[str], columns: int = 128) -> None:
        if columns < 2 or columns % 2:
            raise ValueError(f"columns must be an even number, 2 or more, got {columns}")
        self.names = tuple(names)
        self.columns = columns
        self.samples = 0
        self.missing = TensorMissingRate(names, sync_on_compute=False)
        self.everywhere = TensorMissingRate(names, sync_on_compute=False)
        self.density = AchievedDensity(names, sync_on_compute=False)
        self.error = CompressionError(names, sync_on_compute=False)
        self._places = {name: place for place, name in enumerate(self.names)}
        self._stride = 1  # samples in a column
        self.steps: list[int] = []
        self._counts = np.zeros((2, len(self.names), 0), np.int32)  # missing, windows

    def add(self, step: int, figures: TensorFigures) -> dict[str, float]:
        """Adds a sample.

        Args:
            step: Its position in the heat map.
            figures: Summed over ranks.

        Returns:
            The sample's own ``missing_rate``, ``missing_on_all_ranks``, ``achieved_density`` and
            ``compression_error``, without those that have no denominator.
        """
        if not bool((figures.windows > 0).any()):
            return {}  # averaged as DDP does: nothing could be missing
        figures = TensorFigures(figures.names, figures.sums.cpu())
        ratios = {
            "missing_rate": self.missing(figures),
            "missing_on_all_ranks": self.everywhere(figures.everywhere()),
            "achieved_density": self.density(figures),
            "compression_error": self.error(figures),
        }
        self._add_column(step, figures)
        return {key: float(ratio) for key, ratio in ratios.items() if not ratio.isnan()}

    def _add_column(self, step: int, figures: TensorFigures) -> None:
        if self.samples == self.columns * self._stride:
            self._counts = self._counts[..., ::2] + self._counts[..., 1::2]
            self.steps = self.steps[::2]
            self._stride *= 2
        if self.samples % self._stride == 0:
            self._counts = np.pad(self._counts, ((0, 0), (0, 0), (0, 1)))
            self.steps.append(step)
        places = [self._places[name] for name in figures.names]
        counts = np.stack([figures.missing.numpy(), figures.windows.numpy()])
        self._counts[:, places, -1] += counts.astype(np.int32)
        self.samples += 1

    def rows(self) -> list[TensorRow]:
        """The tensors that were exchanged, in registration order."""
        everywhere, density, error = (m.per_tensor() for m in (self.everywhere, self.density, self.error))
        rates = self.rates().tolist()
        rows = []
        for name, missing in self.missing.per_tensor().items():
            line = tuple(None if rate != rate else rate for rate in rates[self._places[name]])
            rows.append(TensorRow(name, missing, everywhere[name], density[name], error.get(name), line))
        return rows

    def worst(self, count: int) -> list[TensorRow]:
        """The tensors that were missing most often, without those that never were."""
        return worst_first(self.rows())[:count]

    def rates(self) -> np.ndarray:
        """float64 [T, columns so far], the missing rate by tensor and step; NaN where there was no gradient."""
        missing, windows = self._counts
        return np.divide(missing, windows, out=np.full(windows.shape, np.nan), where=windows > 0)

    def summary(self) -> dict[str, Any]:
        """Plain numbers for reports; the callback writes them as ``missing_rate.json``.

        Keys: ``version`` (1), ``samples`` (sampled steps), ``missing_rate`` (over all tensors; null before the first
            sample), ``steps`` (the first step of each column of the heat map), and ``tensors``, in registration
            order: the fields of :class:`TensorRow`. The callback adds ``run``, when the fit began.
        """
        return {
            "version": 1,
            "samples": self.samples,
            "missing_rate": float(self.missing.compute()) if self.samples else None,
            "steps": list(self.steps),
            "tensors": [asdict(row) for row in self.rows()],
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and tensors of their own."""
        return {
            "names": list(self.names),
            "columns": self.columns,
            "samples": self.samples,
            "stride": self._stride,
            "steps": list(self.steps),
            "counts": torch.from_numpy(self._counts.copy()),
            "sums": {name: getattr(self, name).sums for name in _METRICS},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MissingRateStatistics:
        """The statistics of a :meth:`state_dict`."""
        statistics = cls(state["names"], state["columns"])
        statistics.samples, statistics._stride = state["samples"], state["stride"]
        statistics.steps = list(state["steps"])
        statistics._counts = state["counts"].numpy().copy()  # a checkpoint's tensors belong to the checkpoint
        for name in _METRICS:
            getattr(statistics, name).sums = state["sums"][name].clone()
        return statistics


def worst_first(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """The tensors that were missing at some time, those that were missing most often first."""
    missing = [row for row in rows if row.missing > 0]
    return sorted(missing, key=lambda row: (-row.missing, -row.everywhere))
