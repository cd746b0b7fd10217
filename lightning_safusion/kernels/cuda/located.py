"""What the device is told of the gradients of a window: where they are, and which of a buffer's tensors take part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Reductions(NamedTuple):
    """The same of the shard that a worker owns.

    Args:
        addresses, epsilons: Of its pieces.
        launches: Kinds of moments, their tiles, and how many these are.
    """

    addresses: Tensor
    epsilons: Tensor
    launches: list[tuple[int, Tensor, int]]


@dataclass(eq=False)
class Located:
    """Tables on the device, of one set of gradients and flags.

    Args:
        addresses: int64 [4, T], of gradients, moments and lanes, and where means are added up.
        epsilons: float32 [T], of the moments.
        launches: Kinds of gradients and moments, their chunks, and how many these are.
        places: int64 [T], where means are added up: in host memory.
        taken: bool [T], the rows that send something.
        flags: int32 [T], by which tensors differ from those of almost every window; None where all are as these.
        silent: Dense lanes of which nothing is sent.
        shard: Of the worker's own shard.
        constants: The buffer's, of which a window in which all rows send something may change nothing; and its room.
        left: Tensors whose gradients stay as they are.
    """

    addresses: Tensor
    epsilons: Tensor
    launches: list[tuple[int, int, Tensor, int]]
    places: np.ndarray
    taken: np.ndarray
    flags: Tensor | None
    silent: list[Tensor]
    shard: Reductions | None = None
    constants: tuple[Tensor, Tensor, int] | None = None
    left: tuple[int, ...] = ()


def grouped(moments: np.ndarray, own: np.ndarray, weighed: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Kinds of moments, and those of some rows that are launched together; without moments goes with any.

    Args:
        moments: int64 [T], kinds; -1 for none.
        own: bool [T], the rows.
        weighed: Keys are compared.
    """
    found = sorted({*moments[own].tolist()} - {-1}) or [0 if weighed else -1]
    for place, moment in enumerate(found):
        yield moment, own & ((moments == moment) | (moments == -1) & (place == 0))
