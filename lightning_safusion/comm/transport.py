"""Transports: the few collective operations that everything above is written with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor

ReduceOp = Literal["sum", "min", "max"]


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Blocks the host (CPU) or the current stream (CUDA) until the operation has ended; raises if it failed."""

    def on_done(self, callback: Callable[[float], None]) -> None:
        """Calls ``callback(perf_counter seconds)`` once, when the operation has ended, on any thread.

        For measurement only: nothing may be launched from it.
        """


class Transport(ABC):
    """A communicator. All ranks call the same operations in the same order.

    Attributes:
        rank: This worker, from 0.
        world_size: Number of workers.
        stream_ordered: On CUDA, :meth:`Work.wait` makes the current stream wait and not the host (NCCL).
    """

    rank: int
    world_size: int
    stream_ordered: bool = False

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Starts gathering ``tensor`` [B] of every rank into ``output`` [world_size * B], in rank order."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Starts reducing ``tensor`` in place; the result is bitwise equal on all ranks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        """Starts copying ``tensor`` of rank ``source`` to all ranks, in place."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Exchanges small picklable values; blocks. For set-up, never in a step."""

    @abstractmethod
    def subgroup(self) -> Transport:
        """A communicator of its own over the same ranks, for systems whose ranks launch at their own pace."""

    @abstractmethod
    def close(self) -> None:
        """Destroys what :meth:`subgroup` made. Safe to call twice."""
