"""α-β costs of collectives: volumes, times and presets.

Notation: ``n`` workers, ``alpha`` seconds per message, ``beta`` seconds per byte on the link of one worker. A *volume*
is what one worker receives, in bytes (what it sends is equal for these collectives). The formulas are those of Thakur,
Rabenseifner and Gropp (IJHPCA 2005, section 4) and, for sparse payloads, Li and Hoefler (PPoPP 2022, table 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

#: What a plan may take for a buffer; ``"auto"``: a sparse exchange or the dense all-reduce, whichever is predicted to
#: be cheaper.
CollectiveChoice = Literal["auto", "allgather", "allreduce"]

_HUBER = 1.345  # keeps 95 % of the efficiency of least squares on Gaussian noise (Huber 1981)
_NORMAL_MEDIAN = 1.4826  # standard deviation over median absolute error of Gaussian noise


@dataclass(frozen=True)
class LinearCost:
    """Time of an operation as a function of its bytes: ``fixed + per_byte * nbytes``.

    Args:
        fixed: Seconds that do not depend on the size.
        per_byte: Seconds per byte.
    """

    fixed: float
    per_byte: float

    def __call__(self, nbytes: float) -> float:
        """Seconds for ``nbytes`` bytes."""
        return self.fixed + self.per_byte * nbytes


#: Share of its nominal rate that a link carries.
GOODPUT = 0.85


@dataclass(frozen=True)
class Link:
    """A network as one worker sees it.

    Args:
        alpha: Seconds per message.
        beta: Seconds per byte, both directions at once.
        launch: Seconds of starting one collective (host work and kernel launch).
    """

    alpha: float
    beta: float
    launch: float = 0.0

    @property
    def card_gbit(self) -> float:
        """Gbit/s of a network card that carries this, at :data:`GOODPUT` of its nominal rate."""
        return round(8e-9 / (self.beta * GOODPUT), 6)

    def allreduce(self, world_size: int, algorithm: Literal["ring", "tree"] = "ring") -> LinearCost:
        """Dense all-reduce as a function of the bytes of the buffer.

        ``"ring"`` takes ``2 (n - 1)`` messages, ``"tree"`` (recursive halving and doubling) ``2 ceil(log2 n)``.
        """
        steps = {"ring": 2 * (world_size - 1), "tree": 2 * log2_ceil(world_size)}[algorithm]
        return LinearCost(self.launch + steps * self.alpha, ring_allreduce_bytes(world_size, 1) * self.beta)

    def allgather(self, world_size: int, algorithm: Literal["ring", "doubling"] = "ring") -> LinearCost:
        """All-gather as a function of the bytes of one worker's message.

        ``"ring"`` takes ``n - 1`` messages, ``"doubling"`` (recursive doubling) ``ceil(log2 n)``.
        """
        steps = {"ring": world_size - 1, "doubling": log2_ceil(world_size)}[algorithm]
        return LinearCost(self.launch + steps * self.alpha, allgather_bytes(world_size, 1) * self.beta)


def _preset(gigabit: float, alpha_us: float, launch_us: float) -> Link:
    return Link(alpha_us * 1e-6, 8e-9 / (gigabit * GOODPUT), launch_us * 1e-6)


#: Typical links, for simulation and for planning before anything was measured. 85 % of the nominal rate.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "100mbit": _preset(0.1, 100, 30),
        "1gbit": _preset(1, 50, 30),
        "10gbit": _preset(10, 50, 30),
        "25gbit": _preset(25, 50, 30),
        "100gbit-roce": _preset(100, 10, 15),
        "200gbit-rdma": _preset(200, 8, 15),
    }
)


def plain_rate(rate: str) -> str:
    """A rate as names of links have it: ``"25gbit"`` for ``"25Gbps"``, ``"25 Gbit/s"`` and ``"25GBIT"``.

    What is no rate comes back as it is, bytes per second (``"3GB/s"``) among it.
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*([kKmMgG])(?:(?i:bits?(?:/s|ps)?)|bps|b/s)", rate.strip())
    return rate if match is None else f"{match[1]}{match[2].lower()}bit"


def log2_ceil(world_size: int) -> int:
    """``ceil(log2 n)``: rounds of a tree over ``world_size`` workers, at least one."""
    return (world_size - 1).bit_length()


def ring_allreduce_bytes(world_size: int, nbytes: float) -> float:
    """Volume of an all-reduce of a buffer of ``nbytes`` bytes: ``2 (n - 1) / n * nbytes``."""
    return 2 * (world_size - 1) / world_size * nbytes


def allgather_bytes(world_size: int, message: float) -> float:
    """Volume of an all-gather of messages of ``message`` bytes: ``(n - 1) * message``."""
    return (world_size - 1) * message


def fit_linear(samples: Sequence[tuple[float, float]]) -> LinearCost:
    """Fits ``fixed + per_byte * bytes`` to measurements.

    Least squares of the *relative* error, since sizes span orders of magnitude, reweighted by Huber's function so that
    a disturbed measurement counts little. Both coefficients are at least 0. One size alone gives a constant.

    Args:
        samples: ``(bytes, seconds)``.

    Raises:
        ValueError: If there is no sample, or one is negative or not finite.
    """
    data = np.asarray(samples, dtype=np.float64).reshape(-1, 2)
    if not len(data):
        raise ValueError("fit_linear needs at least one (bytes, seconds) sample, got none")
    for nbytes, seconds in data[~((data >= 0) & np.isfinite(data)).all(axis=1)]:
        raise ValueError(f"samples must be finite and not negative, got ({nbytes} bytes, {seconds} s)")
    size, time = data.T
    tiny = float(time.max()) * 1e-9
    if tiny == 0:
        return LinearCost(0.0, 0.0)
    weight = 1 / np.maximum(time, tiny) ** 2
    for _ in range(30):
        fixed, per_byte = _weighted_line(size, time, weight)
        predicted = np.maximum(fixed + per_byte * size, tiny)
        error = np.abs(time - predicted) / predicted
        spread = max(_HUBER * _NORMAL_MEDIAN * float(np.median(error)), 1e-9)
        weight = spread / np.maximum(error, spread) / predicted**2
    return LinearCost(fixed, per_byte)


def _weighted_line(size: np.ndarray, time: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    weight = weight / weight.sum()
    mean_size, mean_time = float(weight @ size), float(weight @ time)
    variance = float(weight @ (size - mean_size) ** 2)
    slope = float(weight @ ((size - mean_size) * (time - mean_time))) / variance if variance > 0 else 0.0
    if slope <= 0:
        return mean_time, 0.0
    fixed = mean_time - slope * mean_size
    if fixed >= 0:
        return fixed, slope
    return 0.0, float(weight @ (size * time)) / float(weight @ (size * size))
