"""Transports over torch.distributed, and the trivial one of a single worker."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_safusion.comm.transport.interface import (
    FinishedWork,
    JoinedWork,
    ReduceOp,
    Transport,
    Work,
    check_pairs,
    check_sizes,
    group_of,
)
from lightning_safusion.comm.transport.lockstep import Lockstep, wait_watchfully

# torch 2.13 renamed the functions and warns about their old names; torch without process groups has none of them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))
_HURRY_S = 1.0
_patience: float | None = None  # for how many seconds the process waits for its groups at its end
_SWAPPED = 1 << 18  # bytes, from which on it takes no longer to broadcast two messages than to gather them


class TorchWork:
    """Operations of a process group.

    On the CPU one operation is done when its transfer ends. On CUDA it is done when it was enqueued, because that is
    when NCCL completes its futures; measure there with events on the stream instead.

    Args:
        works: What the asynchronous collectives returned.
        check: Called now and then by a host that waits; its errors end the wait.
        reports: The backend reports the end of these. Otherwise it is when it has been waited for.
    """

    def __init__(
        self, works: Sequence[dist.Work], check: Callable[[], None] | None = None, reports: bool = True
    ) -> None:
        self._works = works
        self._check = check
        self._reports = reports
        self._callbacks: list[Callable[[float], None]] | None = []

    def wait(self) -> None:
        """Blocks the host (gloo) or the current stream (NCCL); raises the backend's error, the first time."""
        if self._callbacks is None:
            return
        # A work keeps its tensors alive and must not outlive its process group: forget it as soon as it has ended.
        works, callbacks = self._works, self._callbacks
        self._works, self._callbacks = (), None
        for work in works:
            if self._check is None:
                work.wait()
            else:
                wait_watchfully(work, self._check)
        for callback in callbacks:
            callback(time.perf_counter())

    def on_done(self, callback: Callable[[float], None]) -> None:
        """See :meth:`Work.on_done`; after :meth:`wait` it calls back at once."""
        if self._callbacks is None:
            callback(time.perf_counter())
        elif self._reports:
            self._works[0].get_future().add_done_callback(lambda _: callback(time.perf_counter()))
        else:
            self._callbacks.append(callback)


class SoloTransport(Transport):
    """One worker, no process group."""

    rank = 0
    world_size = 1
    stream_ordered = True

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor)
        return FinishedWork()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return FinishedWork()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        return FinishedWork()

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        check_sizes(output, tensor, output_sizes, tensor_sizes, 1)
        output.copy_(tensor)
        return FinishedWork()

    reduce_scatter = all_gather

    def permute(self, output: Tensor, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        check_pairs(pairs, 1)
        return FinishedWork()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        group_of(0, groups, 1)
        return SoloTransport()

    def close(self) -> None:
        """Nothing to destroy."""


class TorchTransport(Transport):
    """The collectives of a process group, always asynchronous.

    Args:
        group: The process group; ``None`` is the default group. It is used, never destroyed.
        timeout: Of the groups that :meth:`subgroup` makes; their backend's default, not that of the default group,
            where it is None.
        lockstep: Objects travel on its process group, and the host looks there whether it waits in vain. None: on
            ``group`` as well.

    Raises:
        RuntimeError: If torch.distributed is not initialised.
        ValueError: If this process is not a member of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, lockstep: Lockstep | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "TorchTransport needs a process group: call torch.distributed.init_process_group first, "
                "or use default_transport(), which also serves a single process"
            )
        self._group = group
        self._timeout = timeout
        self._lockstep = lockstep
        self._subgroups: list[TorchTransport] = []
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"process {dist.get_rank()} is not a member of the process group {group}")
        backends = dist.get_backend_config(group)
        self.stream_ordered = "cuda:nccl" in backends
        # gloo's waits have a time limit that leaves the operation as it is; with NCCL it is not the host that waits
        self._check = lockstep.check if lockstep is not None and "cpu:gloo" in backends else None

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if self.world_size == 2 and not self.stream_ordered and tensor.nbytes >= _SWAPPED and tensor.is_cpu:
            # gloo's own holds all messages twice more while it runs
            messages = output.view(2, -1)
            messages[self.rank].copy_(tensor.view(-1))
            return JoinedWork([self.broadcast(messages[source], source) for source in range(2)])
        return TorchWork([_ALL_GATHER(output, tensor, group=self._group, async_op=True)], self._check)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        operation = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op]
        return self._work(dist.all_reduce(tensor, operation, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        return self._work(dist.broadcast(tensor, self._global_rank(source), group=self._group, async_op=True))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        check_sizes(output, tensor, output_sizes, tensor_sizes, self.world_size)
        sizes = list(output_sizes), list(tensor_sizes)
        return self._work(dist.all_to_all_single(output, tensor, *sizes, group=self._group, async_op=True))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.is_cpu:  # gloo's own reduces the whole tensor on all ranks, at twice the volume
            return super().reduce_scatter(output, tensor)
        return self._work(_REDUCE_SCATTER(output, tensor, group=self._group, async_op=True))

    def permute(self, output: Tensor, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        check_pairs(pairs, self.world_size)
        operations = []
        for source, destination in pairs:
            if source == self.rank:
                operations.append(dist.P2POp(dist.isend, tensor, self._global_rank(destination), self._group))
            if destination == self.rank:
                operations.append(dist.P2POp(dist.irecv, output, self._global_rank(source), self._group))
        # gloo does not report the end of a message from rank to rank, nor waits for it with a limit that does no harm
        return TorchWork(dist.batch_isend_irecv(operations), reports=False) if operations else FinishedWork()

    def gather_objects(self, value: Any) -> list[Any]:
        values, lockstep = [None] * self.world_size, self._lockstep
        if lockstep is not None and self.world_size == dist.get_world_size():
            lockstep.meet("exchange of objects")
            dist.all_gather_object(values, value, group=lockstep.group)
        else:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def host_subgroup(self) -> Transport:
        return self.split([range(self.world_size)], backend="gloo")

    def split(self, groups: Sequence[Sequence[int]], backend: str | None = None) -> Transport:
        """See :meth:`Transport.split`; ValueError also if the process group leaves some processes out."""
        # All processes must take part in new_group. Its use_local_synchronization would lift that, but then torch names
        # the group by its ranks and the number of groups of each process: names differ or repeat, and gloo hangs.
        if self.world_size != dist.get_world_size():
            raise ValueError(
                f"a communicator of its own needs all {dist.get_world_size()} processes, the process group has "
                f"{self.world_size}: use the default process group, or a system that needs no such communicator"
            )
        mine = group_of(self.rank, groups, self.world_size)
        members = [[self._global_rank(r) for r in group] for group in groups]
        made = [dist.new_group(ranks, timeout=self._timeout, backend=backend) for ranks in members]
        transport = TorchTransport(made[list(groups).index(mine)], self._timeout, self._lockstep)
        self._subgroups.append(transport)
        return transport

    def close(self) -> None:
        while self._subgroups:
            transport = self._subgroups.pop(0)
            transport.close()
            if dist.is_initialized():  # else they were destroyed with the default group
                dist.destroy_process_group(transport._group)

    @property
    def place(self) -> int:
        return dist.get_rank()

    def abandon(self) -> None:
        """See :meth:`Transport.abandon`; the groups end with the default one, or with the process.

        NCCL destroys a group only when all of its ranks do, and others may wait in an exchange for this one.
        """
        self._subgroups.clear()

    def _work(self, work: dist.Work) -> TorchWork:
        return TorchWork([work], self._check)

    def _global_rank(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def default_transport(timeout: timedelta | None = None, lockstep: Lockstep | None = None) -> Transport:
    """The default process group, or a single worker where there is none; arguments as of :class:`TorchTransport`."""
    grouped = dist.is_available() and dist.is_initialized()
    return TorchTransport(timeout=timeout, lockstep=lockstep) if grouped else SoloTransport()


@cache
def end_groups_at_exit() -> None:
    """Has all process groups end before the interpreter does, of which Lightning takes care for NCCL alone.

    A process that leaves it to the interpreter may be aborted by gloo's threads, after a training that went well
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit.register(_end_groups)


def hurry_at_exit() -> None:
    """Has the process end soon: operations that an error has left alone would keep it for the group's timeout."""
    global _patience
    _patience = _HURRY_S


def _end_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        thread = Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(_patience)
