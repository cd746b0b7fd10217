"""The transport of virtual workers in one process: of tests, and of studies with more workers than cores."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.transport.interface import ReduceOp, Transport, Work, check_pairs, check_sizes, group_of

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Call:
    """What one rank asked for; all ranks must ask for the same."""

    kind: str
    numel: int | None  # None where it differs from rank to rank
    dtype: torch.dtype | None
    detail: Any = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail != "" else ""
        return f"{self.kind}{detail} of {'' if self.numel is None else f'{self.numel} '}elements of {self.dtype}"


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
        self._children: list[dict[tuple[int, ...], _Exchange]] = []

    def child(self, index: int, groups: Groups, mine: tuple[int, ...]) -> _Exchange:
        """The ``index``-th communicator made from this one, among some ranks; the first rank that asks makes it."""
        with self.changed:
            if index == len(self._children):
                self._children.append({group: _Exchange(len(group), self.timeout) for group in groups})
            children = self._children[index]
            if tuple(children) != groups:
                raise ValueError(f"all ranks must pass the same groups, got {groups} and {tuple(children)}")
            return children[mine]

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
                try:
                    operation.result = _compute(call, [operation.inputs[r] for r in range(self.world_size)])
                except ValueError as error:
                    operation.error = f"operation {number}: {error}"
            operation.inputs.clear()
            operation.finished_at = time.perf_counter()
            callbacks, operation.callbacks = operation.callbacks, []
            self.changed.notify_all()
        for callback in callbacks:
            callback(operation.finished_at)
        return operation

    def finish(self, operation: _Operation) -> list[Any]:
        """Blocks until all ranks have launched; returns the results of all ranks."""
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
            results: list[Any] = operation.result
            return results


class LocalWork:
    """An operation of a virtual worker. Its result is written by :meth:`wait`, as late as a real one may be.

    Args:
        exchange: The communicator.
        operation: The operation.
        rank: The worker.
        output: Where its result goes, if it has one.
    """

    def __init__(self, exchange: _Exchange, operation: _Operation, rank: int, output: Tensor) -> None:
        self._exchange = exchange
        self._operation = operation
        self._rank = rank
        self._output: Tensor | None = output

    def wait(self) -> None:
        """Blocks until all ranks have launched, then writes the result.

        Raises:
            TimeoutError: If some did not in time.
            RuntimeError: If they launched different operations.
        """
        output, self._output = self._output, None
        if output is not None:
            result = self._exchange.finish(self._operation)[self._rank]
            if result is not None:
                output.copy_(result.view_as(output))

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

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        check_sizes(output, tensor, output_sizes, tensor_sizes, self.world_size)
        sent = (tensor.numel() - tensor_sizes[self.rank]) * tensor.itemsize
        received = (output.numel() - output_sizes[self.rank]) * output.itemsize
        call = _Call("all_to_all", None, tensor.dtype)
        pieces = tensor.detach().clone().split(list(tensor_sizes))
        return self._launch(call, (pieces, list(output_sizes)), output, sent, received)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.numel() != self.world_size * output.numel() or output.dtype != tensor.dtype:
            raise ValueError(
                f"reduce_scatter into {output.numel()} {output.dtype} on {self.world_size} ranks needs "
                f"{self.world_size * output.numel()} elements, got {tensor.numel()} {tensor.dtype}"
            )
        volume = allgather_bytes(self.world_size, output.nbytes)
        call = _Call("reduce_scatter", tensor.numel(), tensor.dtype, "sum")
        return self._launch(call, tensor, output, volume, volume)

    def permute(self, output: Tensor, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        check_pairs(pairs, self.world_size)
        sent = tensor.nbytes if self.rank in [source for source, _ in pairs] else 0
        received = output.nbytes if self.rank in [destination for _, destination in pairs] else 0
        return self._launch(
            _Call("permute", tensor.numel(), tensor.dtype, tuple(pairs)), tensor, output, sent, received
        )

    def gather_objects(self, value: Any) -> list[Any]:
        operation = self._enter(_Call("gather_objects", 1, None), copy.deepcopy(value))
        return [copy.deepcopy(theirs) for theirs in self._exchange.finish(operation)[self.rank]]

    def subgroup(self) -> LocalTransport:
        return self.split([range(self.world_size)])

    def split(self, groups: Sequence[Sequence[int]]) -> LocalTransport:
        mine = tuple(group_of(self.rank, groups, self.world_size))
        self._subgroups += 1
        child = self._exchange.child(self._subgroups - 1, tuple(map(tuple, groups)), mine)
        return LocalTransport(mine.index(self.rank), child)

    def close(self) -> None:
        """Nothing to destroy."""

    def _enter(self, call: _Call, value: Any) -> _Operation:
        self._launched += 1
        return self._exchange.launch(self._launched - 1, self.rank, call, value)

    def _launch(self, call: _Call, value: Any, output: Tensor, sent: float, received: float) -> Work:
        self.bytes_sent += sent
        self.bytes_received += received
        if isinstance(value, Tensor):
            value = value.detach().clone()
        return LocalWork(self._exchange, self._enter(call, value), self.rank, output.detach())


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


def _compute(call: _Call, inputs: list[Any]) -> list[Any]:
    """The result of every rank; None for a rank that gets none."""
    n = len(inputs)
    if call.kind == "all_gather":
        return [torch.cat([tensor.flatten() for tensor in inputs])] * n
    if call.kind == "broadcast":
        return [inputs[call.detail]] * n
    if call.kind == "gather_objects":
        return [inputs] * n
    if call.kind == "permute":
        sources = {destination: source for source, destination in call.detail}
        return [inputs[sources[rank]] if rank in sources else None for rank in range(n)]
    if call.kind == "all_to_all":
        return _delivered(inputs)
    total: Tensor = inputs[0]
    for tensor in inputs[1:]:
        total = _combine(total, tensor, call.detail)
    return list(total.flatten().chunk(n)) if call.kind == "reduce_scatter" and total.numel() else [total] * n


def _delivered(inputs: list[tuple[tuple[Tensor, ...], list[int]]]) -> list[Tensor]:
    """What every rank receives, from ``(pieces for all ranks, expected sizes)`` of every rank."""
    results = []
    for rank, (_, expected) in enumerate(inputs):
        pieces = [theirs[rank] for theirs, _ in inputs]
        sizes = [piece.numel() for piece in pieces]
        if sizes != expected:
            raise ValueError(f"rank {rank} expects pieces of {expected} elements, the ranks send it {sizes}")
        results.append(torch.cat(pieces))
    return results


def _combine(left: Tensor, right: Tensor, op: str) -> Tensor:
    if op == "min":
        return torch.minimum(left, right)
    if op == "max":
        return torch.maximum(left, right)
    return left + right
