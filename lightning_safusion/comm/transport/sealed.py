"""A transport whose messages begin with a checksum, so that what was damaged on its way is never read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import (
    DamagedMessageError,
    JoinedWork,
    ReduceOp,
    Transport,
    Work,
    as_bytes,
    group_of,
)
from lightning_safusion.kernels import cpu as native

#: Bytes before a message: CRC-32C of all that follow, the lowest byte first.
SEAL_BYTES = 4


class SealedTransport(Transport):
    """Puts a checksum before every message to one or all ranks, and zeros in the place of one that is damaged.

    Whoever waits asks :meth:`take_damage` before anything of it is used. A message of zeros has no entries in every
    wire format, so that phases that follow end as always: no rank waits for one that has found damage. Whole numbers
    say how long later messages are: where these are damaged, waiting raises an error at once.

    Sums of the library (``all_reduce``, ``reduce_scatter``) and objects pass as they are. Tensors are in host memory.

    Args:
        transport: Carries the closed messages.
        members: Ranks of the job by their rank here; the same by default.
        found: Senders of damaged messages; shared with the communicators that are made from this one.
    """

    sealed = True

    def __init__(
        self, transport: Transport, members: Sequence[int] | None = None, found: list[int] | None = None
    ) -> None:
        self._transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self.stream_ordered = transport.stream_ordered
        self._members = range(self.world_size) if members is None else members
        self._found = [] if found is None else found

    def take_damage(self) -> list[int]:
        found = self._found[:]
        self._found.clear()
        return found

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        sizes = [tensor.nbytes] * self.world_size
        arriving = _closed_memory(sizes)
        work = self._transport.all_gather(arriving, _closed(tensor, sizes[:1]))
        return self._opened(work, arriving, output, range(self.world_size), sizes)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        if source == self.rank:
            return self._transport.broadcast(_closed(tensor, [tensor.nbytes]), source)
        arriving = _closed_memory([tensor.nbytes])
        work = self._transport.broadcast(arriving, source)
        return self._opened(work, arriving, tensor, [source], [tensor.nbytes])

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        into, out = ([size * tensor.itemsize for size in sizes] for sizes in (output_sizes, tensor_sizes))
        arriving, closed = _closed_memory(into), [_closed_size(size) for size in into]
        sending = _closed(tensor, out)
        work = self._transport.all_to_all(arriving, sending, closed, [_closed_size(size) for size in out])
        return self._opened(work, arriving, output, range(self.world_size), into)

    def permute(self, output: Tensor, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        sends = any(source == self.rank for source, _ in pairs)
        sending = _closed(tensor, [tensor.nbytes]) if sends else _closed_memory([tensor.nbytes])
        arriving = _closed_memory([output.nbytes])
        work = self._transport.permute(arriving, sending, pairs)
        sources = [source for source, destination in pairs if destination == self.rank]
        return self._opened(work, arriving, output, sources, [output.nbytes]) if sources else work

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._transport.all_reduce(tensor, op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._transport.reduce_scatter(output, tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._transport.gather_objects(value)

    def subgroup(self) -> Transport:
        return SealedTransport(self._transport.subgroup(), self._members, self._found)

    def host_subgroup(self) -> Transport:
        return SealedTransport(self._transport.host_subgroup(), self._members, self._found)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        mine = [self._members[rank] for rank in group_of(self.rank, groups, self.world_size)]
        return SealedTransport(self._transport.split(groups), mine, self._found)

    def close(self) -> None:
        self._transport.close()

    def abandon(self) -> None:
        self._transport.abandon()

    def _opened(
        self, work: Work, arriving: Tensor, output: Tensor, senders: Iterable[int], sizes: Sequence[int]
    ) -> Work:
        def finish() -> None:
            closed, into = arriving.numpy(), as_bytes(output).numpy()
            at = start = 0
            for sender, size in zip(senders, sizes, strict=True):
                message, target = closed[at : at + _closed_size(size)], into[start : start + size]
                at, start = at + len(message), start + size
                if size and native.crc32c(message[SEAL_BYTES:]) == int.from_bytes(message[:SEAL_BYTES], "little"):
                    target[:] = message[SEAL_BYTES:]
                elif size:
                    target[:] = 0
                    self._damaged(self._members[sender], output.dtype)

        return JoinedWork([work], finish)

    def _damaged(self, sender: int, dtype: torch.dtype) -> None:
        self._found.append(sender)
        if not dtype.is_floating_point and dtype != torch.uint8:
            raise DamagedMessageError(
                f"the lengths of later messages that rank {sender} has sent are damaged: CRC-32C says so"
            )


def _closed_size(size: int) -> int:
    # what is empty has no checksum
    return size + SEAL_BYTES if size else 0


def _closed_memory(sizes: Sequence[int]) -> Tensor:
    return torch.from_numpy(native.empty(sum(map(_closed_size, sizes)), np.uint8))


def _closed(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """uint8, messages of so many bytes that lie in a tensor one behind the other, with their checksums."""
    closed, pieces = _closed_memory(sizes), as_bytes(tensor).numpy()
    into = closed.numpy()
    at = start = 0
    for size in filter(None, sizes):
        message = pieces[start : start + size]
        into[at : at + SEAL_BYTES] = np.frombuffer(native.crc32c(message).to_bytes(SEAL_BYTES, "little"), np.uint8)
        into[at + SEAL_BYTES : at + SEAL_BYTES + size] = message
        at, start = at + SEAL_BYTES + size, start + size
    return closed
