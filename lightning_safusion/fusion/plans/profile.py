"""Measured times that all ranks have agreed on, the cost lines fitted to them, and the costs of a job by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_safusion.comm.cost import LINKS, CollectiveChoice, LinearCost, fit_linear
from lightning_safusion.fusion.plans.costs import GroupCosts, JobShape
from lightning_safusion.fusion.plans.plan import CollectiveName

Samples = Sequence[tuple[float, float]]

_FITTED: tuple[CollectiveName, ...] = ("allgather", "allreduce")
_MOST_LATENCY = 2.0  # fixed cost of a fitted line over the one known before
_LEAST_LATENCY = 0.1  # of the prior: what a known fixed cost counts for at least
_LEAST = 0.5  # of what was calibrated, for a collective of which there are no samples
_FREE = LinearCost(0.0, 0.0)
# Backward and selection of one element, before anything was measured: BERT-large on a V100.
_SECONDS_PER_ELEMENT = 3e-10


@dataclass(frozen=True)
class AgreedProfile:
    """What all ranks together measured; the same on all ranks, bit for bit."""

    arrivals: tuple[float, ...]  #: seconds from the first gradient to each, without selection; -inf: it never came [L]
    select: LinearCost  #: selection, packing and launch of a buffer, by its elements
    decode: LinearCost  #: decoding of a sparse exchange, by the bytes of one rank's message
    allgather: LinearCost  #: sparse exchange, by the bytes of one rank's message
    allreduce: LinearCost  #: dense exchange, by the bytes of the buffer

    @classmethod
    def from_minimum(
        cls,
        vector: np.ndarray,
        num_tensors: int,
        prior: Mapping[str, LinearCost],
        known: AgreedProfile | None = None,
    ) -> AgreedProfile:
        """Reads the minimum over ranks of :meth:`ProfileRecorder.to_vector`, float64, of L tensors.

        Args:
            prior: Costs of ``"allgather"`` and ``"allreduce"`` where the measurements do not tell fixed cost from
                cost per byte, or do not contain the collective at all.
            known: Agreed before: exchanges of one size scale its lines rather than those of ``prior``.

        Raises:
            ValueError: If no rank has recorded a gradient.
        """
        arrivals, local, rows = np.split(vector, [num_tensors, num_tensors + 4])
        if not np.isfinite(arrivals).any():
            raise ValueError("no rank has recorded a gradient: record windows before they are agreed")
        select, decode = np.where(np.isfinite(local), -local, 0.0).reshape(2, 2).tolist()
        lines = None if known is None else {"allgather": known.allgather, "allreduce": known.allreduce}
        exchanges = fit_exchanges(_agreed_samples(rows.reshape(5, -1)), prior, lines)
        return cls(tuple((-arrivals).tolist()), LinearCost(*select), LinearCost(*decode), *exchanges)

    def to_vector(self) -> np.ndarray:
        """All numbers, float64 [L + 8]."""
        lines = (self.select, self.decode, self.allgather, self.allreduce)
        return np.array([*self.arrivals, *(number for line in lines for number in (line.fixed, line.per_byte))])

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> AgreedProfile:
        """Reads what :meth:`to_vector` returned."""
        arrivals, lines = np.split(vector, [-8])
        return cls(tuple(arrivals.tolist()), *(LinearCost(*line) for line in lines.reshape(4, 2).tolist()))


def job_costs(
    shape: JobShape,
    collective: CollectiveChoice,
    profile: AgreedProfile | None,
    prior: Mapping[str, LinearCost] | None,
) -> GroupCosts:
    """What a planner gets; the same on all ranks.

    Selection by elements and decoding by bytes delay the gradients after them: decoding runs when all have come, which
    ends no sooner. What both cost per buffer is ``per_buffer``. A tensor that never came delays nothing.

    Args:
        collective: What buffers may take.
        profile: Agreed times; None as long as there are none.
        prior: Costs of ``"allgather"`` and ``"allreduce"`` until then; None for modelled ones.

    Raises:
        ValueError: If the number of tensors is not that of the profile.
    """
    profile = profile or _modelled(shape, prior)
    if len(shape) != len(profile.arrivals):
        raise ValueError(f"the profile is of {len(profile.arrivals)} tensors, got the sizes of {len(shape)}")
    sizes, widths, counts = (np.array(numbers, np.int64) for numbers in (shape.numels, shape.widths, shape.quotas))
    sparse_bytes = np.where(counts >= sizes, sizes * widths, counts * shape.entry_bytes) + 1.0
    sparse_allowed = collective == "allgather" or (collective == "auto" and not shape.all_dense)
    ready = arrivals = np.maximum.accumulate(np.maximum(profile.arrivals, 0.0))
    if sparse_allowed:
        ready = ready + profile.select.per_byte * np.cumsum(sizes, dtype=np.float64)
        ready = ready + profile.decode.per_byte * np.cumsum(sparse_bytes, dtype=np.float64)
    return GroupCosts(
        numels=shape.numels,
        ready=tuple(ready.tolist()),
        sparse_bytes=tuple(sparse_bytes.tolist()),
        dense_bytes=tuple((sizes * np.minimum(widths, 4)).astype(float).tolist()),
        world_size=shape.world_size,
        sparse=(profile.allgather.fixed, profile.allgather.per_byte),
        dense=(profile.allreduce.fixed, profile.allreduce.per_byte),
        dense_allowed=collective != "allgather",
        sparse_allowed=sparse_allowed,
        per_buffer=profile.select.fixed + profile.decode.fixed,
        arrivals=tuple(arrivals.tolist()),
        select=(profile.select.fixed, profile.select.per_byte, 0.0),
        decode=(profile.decode.fixed, profile.decode.per_byte),
        quotas=shape.quotas,
        hybrid=shape.hybrid,
    )


def _modelled(shape: JobShape, prior: Mapping[str, LinearCost] | None) -> AgreedProfile:
    link, workers = LINKS["10gbit"], shape.world_size
    lines = prior or {
        "allgather": link.allgather(workers, "doubling"),
        "allreduce": link.allreduce(workers, "tree"),
    }
    arrivals = tuple((_SECONDS_PER_ELEMENT * np.cumsum(shape.numels, dtype=np.float64)).tolist())
    return AgreedProfile(arrivals, _FREE, _FREE, lines["allgather"], lines["allreduce"])


def _agreed_samples(rows: np.ndarray) -> dict[CollectiveName, list[tuple[float, float]]]:
    """``(bytes, seconds)`` by collective, from the minimum over ranks of the rows of exchanges [5, samples]."""
    number, minus_number, code, minus_code, seconds = rows
    # A row counts where every rank had the same exchange in it, and at least one had measured it.
    valid = (number == -minus_number) & (code == -minus_code) & (code >= 0) & np.isfinite(seconds)
    samples: dict[CollectiveName, list[tuple[float, float]]] = {"allgather": [], "allreduce": []}
    for entry, duration in zip(code[valid].tolist(), seconds[valid].tolist(), strict=True):
        samples["allreduce" if entry % 2 else "allgather"].append((entry // 2, duration))
    return samples


def fit_or_scale(samples: Iterable[tuple[float, float]], shape: LinearCost) -> LinearCost | None:
    """Fits a line to the medians per size of ``(bytes or elements, seconds)``; ``None`` without samples.

    A plan has a handful of buffers, at worst one: sizes that are too alike to tell the fixed cost from the slope (less
    than a factor of 2 apart), or from which no rise can be seen, scale the line ``shape`` instead.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    if not by_size:
        return None
    # Disturbances only ever lengthen a measurement, so the mean would follow them.
    medians = [(size, float(np.median(by_size[size]))) for size in sorted(by_size)]
    if len(medians) > 1 and medians[-1][0] >= 2 * medians[0][0]:
        line = fit_linear(medians)
        if line.per_byte > 0:
            return line
    ratios = [seconds / shape(size) for size, seconds in medians if shape(size) > 0]
    factor = float(np.median(ratios)) if ratios else 1.0
    return LinearCost(factor * shape.fixed, factor * shape.per_byte)


def fit_exchanges(
    samples: Mapping[CollectiveName, Samples],
    prior: Mapping[str, LinearCost],
    known: Mapping[str, LinearCost] | None = None,
) -> tuple[LinearCost, LinearCost]:
    """Costs of the all-gather and of the all-reduce, from ``(bytes, seconds)`` of each that was used.

    ``prior``: both lines, from a calibration or a model. ``known``: both as fitted before, whose shape samples of one
    size alone then scale; None takes that of ``prior``.
    """
    shape = known or prior
    lines = {name: fit_or_scale(samples[name], shape[name]) for name in _FITTED}
    if known is not None:
        lines = {name: _with_latency_of(known[name], prior[name], line, samples[name]) for name, line in lines.items()}
    allgather, allreduce = (
        lines[name] or _transferred(prior[name], lines[other], prior[other]) for name, other in (_FITTED, _FITTED[::-1])
    )
    return allgather, allreduce


def _with_latency_of(
    known: LinearCost, prior: LinearCost, line: LinearCost | None, samples: Samples
) -> LinearCost | None:
    """The line, if its fixed cost is at most twice the known one; else the line of that fixed cost through the samples.

    The rate of a link can fall to a tenth, its latency does not rise tenfold. The samples of a plan with few buffers
    hardly tell one from the other, and a planner that takes a slow link for a slow start makes fewer buffers where it
    should make more.
    """
    most = _MOST_LATENCY * max(known.fixed, _LEAST_LATENCY * prior.fixed)  # noise can fit 0
    if line is None or line.fixed <= most:
        return line
    slopes = sorted(((seconds - most) / size, size) for size, seconds in samples if size > 0 and seconds > most)
    if not slopes:
        return line
    # the median by bytes: a delayed small message has a rate of its own
    passed = np.cumsum([size for _, size in slopes])
    return LinearCost(most, slopes[int(np.searchsorted(passed, passed[-1] / 2))][0])


def _transferred(prior: LinearCost, measured: LinearCost | None, expected: LinearCost) -> LinearCost:
    """``prior`` of a collective that was not used, corrected as the used one was: latency and bandwidth apart.

    The samples of a plan with few buffers hardly tell one from the other, so that either can seem to cost nothing; an
    all-reduce of a whole model would too.
    """
    if measured is None:
        return prior
    fixed = measured.fixed / expected.fixed if expected.fixed > 0 else 1.0
    per_byte = measured.per_byte / expected.per_byte if expected.per_byte > 0 else 1.0
    return LinearCost(max(fixed, _LEAST) * prior.fixed, max(per_byte, _LEAST) * prior.per_byte)
