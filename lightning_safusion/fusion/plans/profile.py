"""Measured times that all ranks have agreed on, and the costs of a job by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_safusion.comm.cost import LINKS, CollectiveChoice, LinearCost, Link
from lightning_safusion.fusion.plans.costs import GroupCosts, JobShape
from lightning_safusion.fusion.plans.fit import fit_exchanges
from lightning_safusion.fusion.plans.plan import CollectiveName


@dataclass(frozen=True)
class AgreedProfile:
    """What all ranks together measured; the same on all ranks, bit for bit.

    Args:
        arrivals: Seconds from the first gradient to each, selection not counted; -inf where it never came [L].
        select: Selection, packing and launch of a buffer, by its elements.
        decode: Decoding of a sparse exchange by the bytes of one rank's message.
        allgather: Sparse exchange by the bytes of one rank's message.
        allreduce: Dense exchange by the bytes of the buffer.
    """

    arrivals: tuple[float, ...]
    select: LinearCost
    decode: LinearCost
    allgather: LinearCost
    allreduce: LinearCost

    @classmethod
    def from_minimum(
        cls,
        vector: np.ndarray,
        num_tensors: int,
        prior: Mapping[str, LinearCost],
        known: AgreedProfile | None = None,
    ) -> AgreedProfile:
        """Reads the minimum over ranks of :meth:`ProfileRecorder.to_vector`.

        Args:
            vector: The minimum, float64.
            num_tensors: Tensors in the ready order (L).
            prior: Costs of ``"allgather"`` and ``"allreduce"`` where the measurements do not tell fixed cost from
                cost per byte, or do not contain the collective at all.
            known: Agreed before: exchanges of one size scale its lines rather than those of ``prior``.

        Raises:
            ValueError: If no rank has recorded a window of the kind.
        """
        arrivals, local, rows = np.split(vector, [num_tensors, num_tensors + 4])
        if not np.isfinite(arrivals).any():
            raise ValueError("no rank has recorded a window of this kind: record some before they are agreed")
        select_fixed, select_slope, decode_fixed, decode_slope = np.where(np.isfinite(local), -local, 0.0).tolist()
        lines = None if known is None else {"allgather": known.allgather, "allreduce": known.allreduce}
        allgather, allreduce = fit_exchanges(_agreed_samples(rows.reshape(5, -1)), prior, lines)
        return cls(
            tuple((-arrivals).tolist()),
            LinearCost(select_fixed, select_slope),
            LinearCost(decode_fixed, decode_slope),
            allgather,
            allreduce,
        )

    def to_vector(self) -> np.ndarray:
        """All numbers, float64 [L + 8]."""
        lines = (self.select, self.decode, self.allgather, self.allreduce)
        return np.array([*self.arrivals, *(number for line in lines for number in (line.fixed, line.per_byte))])

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> AgreedProfile:
        """Reads what :meth:`to_vector` returned."""
        *arrivals, sf, sb, df, db, gf, gb, rf, rb = vector.tolist()
        return cls(tuple(arrivals), LinearCost(sf, sb), LinearCost(df, db), LinearCost(gf, gb), LinearCost(rf, rb))

    def group_costs(
        self,
        numels: Sequence[int],
        sparse_bytes: Sequence[float],
        dense_bytes: Sequence[float],
        world_size: int,
        *,
        dense_allowed: bool = True,
        sparse_allowed: bool = True,
    ) -> GroupCosts:
        """The costs that planners take, for tensors in ready order.

        Selection by elements and decoding by bytes delay the gradients behind them: decoding runs when all have come,
        which ends no sooner. What both cost per buffer is ``per_buffer``. A tensor that never came holds nobody up.

        Args:
            numels: Elements of each tensor [L].
            sparse_bytes: Bytes that each tensor adds to a sparse message [L].
            dense_bytes: Bytes that each tensor adds to a dense all-reduce [L].
            world_size: Workers.
            dense_allowed, sparse_allowed: The collectives that a buffer may take.

        Raises:
            ValueError: If the number of tensors is not that of the profile.
        """
        if len(numels) != len(self.arrivals):
            raise ValueError(f"the profile is of {len(self.arrivals)} tensors, got the sizes of {len(numels)}")
        ready = arrivals = np.maximum.accumulate(np.maximum(self.arrivals, 0.0))
        if sparse_allowed:
            ready = ready + self.select.per_byte * np.cumsum(numels, dtype=np.float64)
            ready = ready + self.decode.per_byte * np.cumsum(sparse_bytes, dtype=np.float64)
        return GroupCosts(
            numels=tuple(numels),
            ready=tuple(ready.tolist()),
            sparse_bytes=tuple(sparse_bytes),
            dense_bytes=tuple(dense_bytes),
            world_size=world_size,
            sparse=(self.allgather.fixed, self.allgather.per_byte),
            dense=(self.allreduce.fixed, self.allreduce.per_byte),
            dense_allowed=dense_allowed,
            sparse_allowed=sparse_allowed,
            per_buffer=self.select.fixed + self.decode.fixed,
            arrivals=tuple(arrivals.tolist()),
            select=(self.select.fixed, self.select.per_byte, 0.0),
            decode=(self.decode.fixed, self.decode.per_byte),
        )


def modelled_costs(
    numels: Sequence[int],
    sparse_bytes: Sequence[float],
    dense_bytes: Sequence[float],
    world_size: int,
    *,
    link: Link = LINKS["25gbit"],
    seconds_per_element: float = 3e-10,
    dense_allowed: bool = True,
    sparse_allowed: bool = True,
) -> GroupCosts:
    """Costs without a single measurement: for ``Trainer(deterministic=True)``, and before anything was measured.

    Args:
        numels: Elements of each tensor in ready order [L].
        sparse_bytes: Bytes that each tensor adds to a sparse message [L].
        dense_bytes: Bytes that each tensor adds to a dense all-reduce [L].
        world_size: Workers.
        link: The network.
        seconds_per_element: Backward and selection of one element; the default is that of BERT-large on a V100.
        dense_allowed, sparse_allowed: The collectives that a buffer may take.
    """
    none = LinearCost(0.0, 0.0)
    profile = AgreedProfile(
        arrivals=tuple((seconds_per_element * np.cumsum(numels, dtype=np.float64)).tolist()),
        select=none,
        decode=none,
        allgather=link.allgather(world_size, "doubling"),
        allreduce=link.allreduce(world_size, "tree"),
    )
    return profile.group_costs(
        numels, sparse_bytes, dense_bytes, world_size, dense_allowed=dense_allowed, sparse_allowed=sparse_allowed
    )


def job_costs(
    shape: JobShape,
    collective: CollectiveChoice,
    profile: AgreedProfile | None,
    prior: Mapping[str, LinearCost] | None,
) -> GroupCosts:
    """What a planner is asked with; the same on all ranks.

    Args:
        shape: Sizes and quotas of the tensors.
        collective: What buffers may take.
        profile: Agreed times; None as long as there are none.
        prior: Costs of ``"allgather"`` and ``"allreduce"`` until then; None for modelled ones.
    """
    sizes, widths, counts = (np.array(numbers, np.int64) for numbers in (shape.numels, shape.widths, shape.quotas))
    sparse = np.where(counts >= sizes, sizes * widths, counts * shape.entry_bytes) + 1.0
    arguments = {
        "numels": shape.numels,
        "sparse_bytes": tuple(sparse.tolist()),
        "dense_bytes": tuple((sizes * np.minimum(widths, 4)).astype(float).tolist()),
        "world_size": shape.world_size,
        "dense_allowed": collective != "allgather",
        "sparse_allowed": collective == "allgather" or (collective == "auto" and not shape.all_dense),
    }
    return replace(_priced(arguments, profile, prior), quotas=shape.quotas, hybrid=shape.hybrid)


def _priced(
    arguments: dict[str, Any], profile: AgreedProfile | None, prior: Mapping[str, LinearCost] | None
) -> GroupCosts:
    if profile is not None:
        return profile.group_costs(**arguments)
    modelled = modelled_costs(**arguments, link=LINKS["10gbit"])
    if prior is None:
        return modelled
    lines = {name: (prior[name].fixed, prior[name].per_byte) for name in ("allgather", "allreduce")}
    return replace(modelled, sparse=lines["allgather"], dense=lines["allreduce"])


def _agreed_samples(rows: np.ndarray) -> dict[CollectiveName, list[tuple[float, float]]]:
    """``(bytes, seconds)`` of each collective, from the minimum over ranks of the rows of exchanges [5, samples]."""
    number, minus_number, code, minus_code, seconds = rows
    # A row counts where every rank had the same exchange in it, and at least one had measured it.
    valid = (number == -minus_number) & (code == -minus_code) & (code >= 0) & np.isfinite(seconds)
    samples: dict[CollectiveName, list[tuple[float, float]]] = {"allgather": [], "allreduce": []}
    for entry, duration in zip(code[valid].tolist(), seconds[valid].tolist(), strict=True):
        samples["allreduce" if entry % 2 else "allgather"].append((entry // 2, duration))
    return samples
