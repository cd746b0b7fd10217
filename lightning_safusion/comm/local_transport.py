"""Virtual workers in one process: the transport of tests and of studies with more workers than cores."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.transport import ReduceOp, Transport, Work


@dataclass(frozen=True)
class _Call:
    """What one rank asked for; all ranks must ask for the same."""

    kind: str
    numel: int
    dtype: torch.dtype | None
    detail: str | int = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail != "" else ""
        return f"{self.kind}{detail} of {self.numel} elements of {self.dtype}"


@dataclass
class _Operation:
    """One collective, while it is under way."""

    number: int
    calls: dict[int, _Call] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)
    callbacks: list[Callable[[float], None]] = field(default_factory=list)
    finished_at: float | None = None
    error: str | None = None
    result: Any = None


class _Exchange:
    """What the ranks of one communicator share: operations, matched by the order of each rank's calls."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.changed = threading.Condition()
        self._operations: dict[int, _Operation] = {}
        self._children: list[_Exchange] = []

    def child(self, index: int) -> _Exchange:
        """The ``index``-th communicator made from this one; the first rank that asks makes it."""
        with self.changed:
            if index == len(self._children):
                self._children.append(_Exchange(self.world_size, self.timeout))
            return self._children[index]

    def launch(self, number: int, rank: int, call: _Call, value: Any) -> _Operation:
        with self.changed:
            operation = self._operations.setdefault(number, _Operation(number))
            operation.calls[rank] = call
            operation.inputs[rank] = value
            first, expected = next(iter(operation.calls.items()))
            if call != expected and operation.error is None:
                operation.error = (
                    f"operation {number} does not match: rank {first} launched {expected}, rank {rank} launched {call}"
                )
            if len(operation.calls) < self.world_size:
                return operation
            del self._operations[number]  # from here on only the works of the ranks keep it
            if operation.error is None:
                operation.result = _compute(call, [operation.inputs[r] for r in range(self.world_size)])
            operation.inputs.clear()
            operation.finished_at = time.perf_counter()
            callbacks, operation.callbacks = operation.callbacks, []
            self.changed.notify_all()
        for callback in callbacks:
            callback(operation.finished_at)
        return operation

    def finish(self, operation: _Operation) -> Any:
        """Blocks until all ranks have launched; returns the result."""
        with self.changed:
            self.changed.wait_for(lambda: operation.finished_at is not None or operation.error, self.timeout)
            if operation.error is None and operation.finished_at is None:
                missing = [rank for rank in range(self.world_size) if rank not in operation.calls]
                call = next(iter(operation.calls.values()))
                operation.error = (
                    f"operation {operation.number}, {call}: ranks {missing} did not launch it within {self.timeout} s"
                )
                self.changed.notify_all()
                raise TimeoutError(operation.error)
            if operation.error is not None:
                raise RuntimeError(operation.error)
            return operation.result


class LocalWork:
    """An operation of a virtual worker. Its result is written by :meth:`wait`, as late as a real one may be.

    Args:
        exchange: The communicator.
        operation: The operation.
        output: Where the result goes.
    """

    def __init__(self, exchange: _Exchange, operation: _Operation, output: Tensor) -> None:
        self._exchange = exchange
        self._operation = operation
        self._output: Tensor | None = output

    def wait(self) -> None:
        """Blocks until all ranks have launched, then writes the result.

        Raises:
            TimeoutError: If some did not in time.
            RuntimeError: If they launched different operations.
        """
        output, self._output = self._output, None
        if output is not None:
            output.copy_(self._exchange.finish(self._operation).view_as(output))

    def on_done(self, callback: Callable[[float], None]) -> None:
        """See :meth:`Work.on_done`: an operation has ended when the last rank launched it."""
        with self._exchange.changed:
            finished_at = self._operation.finished_at
            if finished_at is None:
                self._operation.callbacks.append(callback)
        if finished_at is not None:
            callback(finished_at)


class LocalTransport(Transport):
    """One of several virtual workers; made by :func:`local_transports`.

    The workers may be threads, or a single thread that launches the operations of all ranks before it waits for any.
    Inputs are copied at launch. Sums run in rank order, so that they are bitwise equal on all ranks.

    Attributes:
        bytes_received: What this rank would have received so far, by the volumes of ring algorithms; subgroups count
            for themselves.
        bytes_sent: The same for what it would have sent.
    """

    def __init__(self, rank: int, exchange: _Exchange) -> None:
        self.rank = rank
        self.world_size = exchange.world_size
        self.bytes_received = 0.0
        self.bytes_sent = 0.0
        self._exchange = exchange
        self._launched = 0
        self._subgroups = 0

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if output.numel() != self.world_size * tensor.numel() or output.dtype != tensor.dtype:
            raise ValueError(
                f"all_gather of {tensor.numel()} {tensor.dtype} on {self.world_size} ranks needs an output of "
                f"{self.world_size * tensor.numel()}, got {output.numel()} {output.dtype}"
            )
        volume = allgather_bytes(self.world_size, tensor.nbytes)
        return self._launch(_Call("all_gather", tensor.numel(), tensor.dtype), tensor, output, volume, volume)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        volume = ring_allreduce_bytes(self.world_size, tensor.nbytes)
        return self._launch(_Call("all_reduce", tensor.numel(), tensor.dtype, op), tensor, tensor, volume, volume)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        if not 0 <= source < self.world_size:
            raise ValueError(f"broadcast from rank {source}, but ranks are 0 to {self.world_size - 1}")
        sent = allgather_bytes(self.world_size, tensor.nbytes) if self.rank == source else 0
        received = 0 if self.rank == source else tensor.nbytes
        return self._launch(_Call("broadcast", tensor.numel(), tensor.dtype, source), tensor, tensor, sent, received)

    def gather_objects(self, value: Any) -> list[Any]:
        operation = self._enter(_Call("gather_objects", 1, None), copy.deepcopy(value))
        return [copy.deepcopy(theirs) for theirs in self._exchange.finish(operation)]

    def subgroup(self) -> LocalTransport:
        self._subgroups += 1
        return LocalTransport(self.rank, self._exchange.child(self._subgroups - 1))

    def close(self) -> None:
        """Nothing to destroy."""

    def _enter(self, call: _Call, value: Any) -> _Operation:
        self._launched += 1
        return self._exchange.launch(self._launched - 1, self.rank, call, value)

    def _launch(self, call: _Call, tensor: Tensor, output: Tensor, sent: float, received: float) -> Work:
        self.bytes_sent += sent
        self.bytes_received += received
        return LocalWork(self._exchange, self._enter(call, tensor.detach().clone()), output.detach())


def local_transports(world_size: int, timeout: float = 30.0) -> list[LocalTransport]:
    """Makes the transports of ``world_size`` virtual workers that share this process.

    Args:
        world_size: Number of workers.
        timeout: Seconds that a wait lasts before it raises an error that names the missing ranks.

    Raises:
        ValueError: If there is no worker.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    exchange = _Exchange(world_size, timeout)
    return [LocalTransport(rank, exchange) for rank in range(world_size)]


def _compute(call: _Call, inputs: list[Any]) -> Any:
    if call.kind == "all_gather":
        return torch.cat([tensor.flatten() for tensor in inputs])
    if call.kind == "broadcast":
        return inputs[int(call.detail)]
    if call.kind == "gather_objects":
        return inputs
    total: Tensor = inputs[0]
    for tensor in inputs[1:]:
        total = _combine(total, tensor, call.detail)
    return total


def _combine(left: Tensor, right: Tensor, op: str | int) -> Tensor:
    if op == "min":
        return torch.minimum(left, right)
    if op == "max":
        return torch.maximum(left, right)
    return left + right
