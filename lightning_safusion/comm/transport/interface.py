"""Transports: the few collective operations that everything above is written with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ReduceOp = Literal["sum", "min", "max"]


# In the errors of a process group whose connections are gone; some of them are plain RuntimeErrors.
_FAILURES: Any = getattr(dist, "DistError", ())  # where torch is built without process groups there is none
_LIBRARIES = ("gloo", "NCCL", "Horovod", "Connection closed by peer", "pair closure")
_stages: list[str] = []  # of the main thread, which alone waits for other workers in them
_who: Callable[[], str] | None = None  # says who is lost


class WorkerLostError(RuntimeError):
    """Another worker has ended, or does not answer any more."""


class DamagedMessageError(RuntimeError):
    """A message was damaged on its way, as its checksum says; nothing of its window was applied."""


def comes_of_a_loss(error: BaseException) -> bool:
    """Whether an error is that of a collective whose process group has failed, and has no name yet."""
    if isinstance(error, WorkerLostError | DamagedMessageError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, _FAILURES) or any(name in str(error) for name in _LIBRARIES)


def find_lost_with(who: Callable[[], str] | None) -> None:
    """Has :func:`lost_workers` ask ``who``, which waits a second at most."""
    global _who
    _who = who


def lost_workers() -> str:
    """A clause about the workers whose loss has made a collective fail."""
    return "it has ended, or does not answer" if _who is None else _who()


@contextmanager
def during(what: str) -> Iterator[None]:
    """Turns the error of a failed collective into a WorkerLostError that names the stage of the job ("set-up")."""
    _stages.append(what)
    try:
        yield
    except RuntimeError as error:
        if not comes_of_a_loss(error):
            raise
        raise WorkerLostError(
            f"a worker was lost during {what}: {lost_workers()}. Its own output says why. ({error})"
        ) from error
    finally:
        _stages.pop()


def present_stage() -> str | None:
    """What the innermost :func:`during` of this process is about; None outside of any."""
    return _stages[-1] if _stages else None


class Work(Protocol):
    """An asynchronous operation."""

    def wait(self) -> None:
        """Blocks the host (CPU) or the current stream (CUDA) until the operation has ended; raises if it failed."""

    def on_done(self, callback: Callable[[float], None]) -> None:
        """Calls ``callback(perf_counter seconds)`` once, when the operation has ended, on any thread.

        For measurement only: nothing may be launched from it.
        """


class FinishedWork:
    """An operation that ended when it was launched."""

    def wait(self) -> None:
        return

    def on_done(self, callback: Callable[[float], None]) -> None:
        callback(time.perf_counter())


class JoinedWork:
    """Operations as one: it has ended when all of them have.

    Args:
        works: If there are none, :meth:`on_done` never calls back.
        finish: Called once by :meth:`wait`, when all have ended. For :meth:`on_done` the end is before it.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def on_done(self, callback: Callable[[float], None]) -> None:
        left, lock = len(self._works), Lock()

        def done(now: float) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                callback(now)

        for work in self._works:
            work.on_done(done)


class LaterWork(JoinedWork):
    """An operation that runs when it is waited for. When it has ended is not recorded.

    Args:
        run: Is called once.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__([], run)


class Transport(ABC):
    """A communicator. All ranks call the same operations in the same order.

    An operation that a library lacks raises NotImplementedError.

    Attributes:
        rank: This worker, from 0.
        world_size: Number of workers.
        stream_ordered: On CUDA, :meth:`Work.wait` makes the current stream wait and not the host (NCCL).
        sealed: Messages have checksums: after a wait, :meth:`take_damage` says which were not whole.
    """

    rank: int
    world_size: int
    stream_ordered: bool = False
    sealed: bool = False

    def __deepcopy__(self, memo: object) -> Transport:
        return self  # its workers know of one

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
        """Exchanges small picklable values, in rank order; blocks. For set-up, never in a step."""

    def subgroup(self) -> Transport:
        """Another communicator of the same ranks, with an order of launches of its own. Collective."""
        return self.split([range(self.world_size)])

    def host_subgroup(self) -> Transport:
        """As :meth:`subgroup`, for small tensors in host memory, whatever the device of the gradients."""
        return self.subgroup()

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        """Starts sending a piece of ``tensor`` to every rank, and receives one from each; sizes may differ.

        Implementations send to rank + 1, rank + 2, ..., so that no rank receives from all others at once.

        Args:
            output: One-dimensional; gets the pieces of all ranks, in rank order.
            tensor: One-dimensional; the pieces for all ranks, in rank order.
            output_sizes: Elements that come from each rank, as that rank's ``tensor_sizes`` has them.
            tensor_sizes: Elements that go to each rank.
        """
        raise self._lacks("all_to_all")

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """Starts adding up ``tensor`` [n * B] over all ``n`` ranks; rank ``r`` gets piece ``r`` as ``output`` [B].

        By default the pieces are sent to their owners and added there in float32, in rank order.
        """
        pieces, sizes = torch.empty_like(tensor), [output.numel()] * self.world_size
        work = self.all_to_all(pieces, tensor, sizes, sizes)
        return JoinedWork([work], lambda: add_up(output, pieces.view(self.world_size, -1)))

    def permute(self, output: Tensor, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        """Starts copying ``tensor`` of each source into ``output`` of its destination, point to point.

        All ranks call it with the same pairs ``(source, destination)``, as XLA's CollectivePermute; a rank in no pair
        does nothing. ``output`` is written on destinations only, ``tensor`` is read on sources only.
        """
        raise self._lacks("permute")

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        """A communicator among the ranks of this rank's group, in its order. All ranks pass the same groups."""
        raise self._lacks("split")

    @property
    def place(self) -> int:
        """Rank among all workers of the job."""
        return self.rank

    def take_damage(self) -> list[int]:
        """Ranks of the job whose damaged messages this one has waited for, here or in communicators made from this
        one, since the last call."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Destroys what :meth:`subgroup` and :meth:`split` made. Safe to call twice. May wait for the other ranks."""

    def abandon(self) -> None:
        """In place of :meth:`close` where an error has ended training: waits for nobody."""
        self.close()

    def _lacks(self, operation: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} has no {operation}: use transport='torch', or a collective that does without it"
        )


def group_of(rank: int, groups: Sequence[Sequence[int]], world_size: int) -> Sequence[int]:
    """The group that a rank is in. Raises ValueError unless every rank is in one group, in ascending order."""
    members = [member for group in groups for member in group]
    if sorted(members) != list(range(world_size)) or any(list(group) != sorted(group) for group in groups):
        raise ValueError(
            f"groups must hold each of the ranks 0 to {world_size - 1} once, in ascending order within a group, "
            f"got {[list(group) for group in groups]}"
        )
    return next(group for group in groups if rank in group)


def check_pairs(pairs: Sequence[tuple[int, int]], world_size: int) -> None:
    """Raises ValueError unless every rank is a source and a destination once at most, and none is its own."""
    sources, destinations = {source for source, _ in pairs}, {destination for _, destination in pairs}
    once = len(sources) == len(pairs) == len(destinations)
    known = (sources | destinations).issubset(range(world_size))
    if not once or not known or any(source == destination for source, destination in pairs):
        raise ValueError(
            f"permute needs (source, destination) pairs of different ranks below {world_size}, each a source and a "
            f"destination once at most, got {list(pairs)}"
        )


def check_sizes(
    output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int], world_size: int
) -> None:
    """Raises ValueError unless there is a size for each rank, and the sizes add up to those of the tensors."""
    for name, buffer, sizes in (("output", output, output_sizes), ("tensor", tensor, tensor_sizes)):
        if len(sizes) != world_size or sum(sizes) != buffer.numel() or min(sizes) < 0:
            raise ValueError(
                f"all_to_all on {world_size} ranks with {name} of {buffer.numel()} elements needs {world_size} sizes "
                f"that add up to them, got {list(sizes)}"
            )


def add_up(output: Tensor, pieces: Tensor) -> None:
    """Writes the sum over the rows of ``pieces``, in their order; 16-bit floats are added in float32."""
    narrow = output.is_floating_point() and output.itemsize < 4
    total = pieces[0].to(torch.float32) if narrow else pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    output.copy_(total.view_as(output))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)
