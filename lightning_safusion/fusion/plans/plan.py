"""Plans: which tensors share a buffer, and which collective carries it. Immutable values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

#: ``"allgather"`` means every sparse exchange (see ``comm/catalogue.py``): planners do not distinguish them.
CollectiveName = Literal["allgather", "allreduce", "stream"]


@dataclass(frozen=True)
class Group:
    """One fusion buffer: the tensors at places ``start`` to ``stop - 1`` of the ready order."""

    start: int
    stop: int
    #: ``"allgather"`` (sparse), ``"allreduce"`` (dense), or ``"stream"`` (sparse, one tensor of a stream of buffers
    #: that each worker fills at its own pace).
    collective: CollectiveName = "allgather"
    dense_upto: int = 0  #: tensors of up to this many elements are dense, and the others send as much less
    half: bool = False  #: a dense all-reduce of float32 gradients sends float16

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a group needs at least one tensor, got places {self.start} to {self.stop}")


@dataclass(frozen=True)
class Plan:
    """Contiguous groups that cover the ready order exactly once.

    Raises:
        ValueError: If a tensor is left out or comes twice.
    """

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        place = 0
        for group in self.groups:
            if group.start != place:
                raise ValueError(f"group {group} does not begin at place {place}: a tensor is missing or comes twice")
            place = group.stop

    @property
    def num_tensors(self) -> int:
        """Tensors covered (L)."""
        return self.groups[-1].stop if self.groups else 0

    @cached_property
    def digest(self) -> int:
        """63-bit hash, the same in every process for the same plan (compared across ranks before use)."""
        text = ";".join(
            f"{g.start}-{g.stop}:{g.collective}" + (f":{g.dense_upto}" if g.dense_upto else "") + ":half" * g.half
            for g in self.groups
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def to_list(self) -> list[list[Any]]:
        """``[tensors, collective, dense_upto, half]`` of each group, without zeros at its end, for a checkpoint."""
        rows: list[list[Any]] = []
        for group in self.groups:
            row = [group.stop - group.start, group.collective, group.dense_upto, int(group.half)]
            while not row[-1]:
                row.pop()
            rows.append(row)
        return rows

    @classmethod
    def from_list(cls, groups: Iterable[Sequence[Any]]) -> Plan:
        """Reads what :meth:`to_list` returned."""
        result: list[Group] = []
        for count, collective, *rest in groups:
            place = result[-1].stop if result else 0
            dense_upto, half = [*map(int, rest), 0, 0][:2]
            result.append(Group(place, place + int(count), collective, dense_upto, bool(half)))
        return cls(tuple(result))

    @classmethod
    def from_stops(cls, stops: Iterable[int], collective: CollectiveName = "allgather") -> Plan:
        """The plan whose groups end at ``stops`` (rising places), all with the same collective."""
        return cls(tuple(Group(start, stop, collective) for start, stop in pairwise([0, *stops])))
