"""One worker's link, emulated: other workers are echoes of this one, and what they send comes as late as a link says.

Operations wait for the link one after the other, on a stream of their own as NCCL's do, and copy then. What waits is a
program of one thread that reads the device's clock; in a rehearsal it is the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.futures import Future

from lab.gpu.device import Device
from lab.gpu.figures import Figure
from lab.gpu.jobs import Echo
from lightning_safusion.comm.collectives.ok_allreduce import OkTopkExchange
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LINKS, Link
from lightning_safusion.comm.transport.interface import ReduceOp, Transport, Work, check_sizes, group_of

#: Seconds of the operation by which a network checks itself, and how far it may be off.
CHECKED, TOLERANCE = 0.02, 0.02


def link_of(name: str) -> Link:
    """A link of ``comm.cost.LINKS``, whose launches are the emulation's own: alpha and beta alone."""
    return Link(LINKS[name].alpha, LINKS[name].beta)


@triton.jit
def pass_time(seconds: tl.tensor) -> None:
    """Ends after so many seconds (float32) of the device's clock."""
    wanted = (seconds * 1e9).to(tl.int64)
    begin = tl.extra.cuda.globaltimer()
    passed = begin - begin
    while passed < wanted:
        passed = tl.extra.cuda.globaltimer() - begin


class Delivery:
    """An operation behind the link: a work of a transport, and what torch's hooks expect of one.

    Args:
        network: That it has passed.
        tensors: That it has read or written: they are kept until it has been waited for.
        end: An event of the link's stream; in a rehearsal seconds of ``perf_counter``.
    """

    def __init__(self, network: Network, tensors: Sequence[Tensor], end: Any) -> None:
        self._network, self._tensors, self._end = network, tensors, end

    def wait(self) -> None:
        """Blocks the current stream; in a rehearsal the host."""
        if self._network.stream is not None:
            torch.cuda.current_stream().wait_event(self._end)
        else:
            time.sleep(max(0.0, self._end - time.perf_counter()))
        self._tensors = ()

    def on_done(self, callback: Callable[[float], None]) -> None:
        """Calls back at once, as NCCL's operations are done for the host when they were queued."""
        callback(time.perf_counter())

    def get_future(self) -> Future[list[Tensor]]:
        """Complete at once; who reads it waits on its stream, as with NCCL's."""
        stream, tensors = self._network.stream, list(self._tensors)
        if stream is None:
            self.wait()
            future: Future[list[Tensor]] = Future()
            future.set_result(tensors)
            return future
        future = Future(devices=[stream.device])
        with torch.cuda.stream(stream):
            future.set_result(tensors)
        return future


class Network:
    """The link of one of several workers.

    Args:
        place: The device.
        link: Its latency and rate.
        world_size: Workers.

    Attributes:
        free: Operations take no time, as on an infinitely fast link; set from outside.
        stream: On which they wait; None in a rehearsal.
        seconds: For which the link was busy so far.
    """

    def __init__(self, place: Device, link: Link, world_size: int) -> None:
        self.link, self.world_size, self.free, self.seconds = link, world_size, False, 0.0
        self.stream = torch.cuda.Stream(place.device) if place.cuda else None
        self._idle_from = 0.0  # in a rehearsal, seconds of perf_counter

    def deliver(self, seconds: float, copy: Callable[[], object], tensors: Sequence[Tensor]) -> Delivery:
        """Queues an operation.

        Args:
            seconds: For which it occupies the link.
            copy: Writes what comes.
            tensors: That it reads or writes.
        """
        seconds = 0.0 if self.free else seconds
        self.seconds += seconds
        if self.stream is None:
            copy()
            self._idle_from = max(self._idle_from, time.perf_counter()) + seconds
            return Delivery(self, tensors, self._idle_from)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if seconds:
                pass_time[(1,)](seconds, num_warps=1)
            copy()
            end = torch.cuda.Event()
            end.record()
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return Delivery(self, tensors, end)

    def transport(self) -> BehindLink:
        """A communicator of all workers."""
        return BehindLink(self, self.world_size)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Has torch's communication hooks, and exchanges with owners, pass this link.

        Hooks see a process group of one worker, and its mean of equal gradients is the gradient: what they reduce is
        read and written, and stays. (An owner's message is of its own shard, so an echo of this worker's would be
        damaged: other owners send the flags of this worker, and no entries. For the same reason Ok-Topk's regions are
        equal.)
        """
        cost = self.link.allreduce(self.world_size)

        def all_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Delivery | None:
            work = self.deliver(cost(tensor.nbytes), lambda: tensor.mul_(1), [tensor])
            if async_op:
                return work
            work.wait()
            return None

        def scatter(exchange: ShardedExchange) -> None:
            header = exchange._own_header
            exchange.arriving[:, : len(header)] = header
            launch(exchange)

        def gather(exchange: ShardedExchange) -> None:
            if exchange._size and isinstance(exchange._beside, BehindLink):
                exchange._gathering = exchange._beside.gather_alone(exchange.gathered_sums, exchange.sums)

        def equal_regions(exchange: OkTopkExchange) -> tuple[Tensor, Work]:
            numel, workers = exchange.spec.numel, self.world_size
            edges = torch.tensor([numel * part // workers for part in range(workers + 1)], device=exchange.device)
            return edges, exchange.transport.all_reduce(edges)

        launch = ShardedExchange._launch_first
        with (
            patch.object(dist, "all_reduce", all_reduce),
            patch.object(ShardedExchange, "_launch_first", scatter),
            patch.object(ShardedExchange, "gather", gather),
            patch.object(OkTopkExchange, "_propose_edges", equal_regions),
        ):
            yield

    def checked(self, place: Device) -> Figure:
        """How long an all-reduce that would take :data:`CHECKED` seconds did take, over that."""
        cost = self.link.allreduce(self.world_size)
        buffer = torch.zeros(round((CHECKED - cost.fixed) / cost.per_byte / 4), device=place.device)
        transport = self.transport()
        transport.all_reduce(buffer).wait()  # compiles
        place.wait()
        begin = place.moment()
        transport.all_reduce(buffer).wait()
        seconds = place.seconds(begin, place.moment())
        name = f"emulated link of {self.link.card_gbit:g} Gbit/s: an all-reduce over its formula"
        about = f"{buffer.nbytes:,} bytes among {self.world_size} workers"
        return Figure(name, seconds / cost(buffer.nbytes), least=1 - TOLERANCE, most=1 + TOLERANCE, note=about)


class BehindLink(Echo):
    """One of several workers that all send what this one sends, behind the link of a network.

    Communicators that are made from it share the link.

    Args:
        network: Its link.
        world_size: Workers of this communicator.
    """

    def __init__(self, network: Network, world_size: int) -> None:
        super().__init__(world_size)
        self.network = network

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        seconds = self.network.link.allgather(self.world_size)(tensor.nbytes)
        echo = super().all_gather
        return self.network.deliver(seconds, lambda: echo(output, tensor), [output, tensor])

    def gather_alone(self, output: Tensor, tensor: Tensor) -> Work:
        """As :meth:`all_gather`, but other workers' rows of ``output`` stay as they are."""
        seconds = self.network.link.allgather(self.world_size)(tensor.nbytes)
        return self.network.deliver(seconds, lambda: output[self.rank].copy_(tensor), [output, tensor])

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        seconds = self.network.link.allreduce(self.world_size)(tensor.nbytes)
        echo = super().all_reduce
        return self.network.deliver(seconds, lambda: echo(tensor, op), [tensor])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Work:
        link = self.network.link
        return self.network.deliver(link.alpha + link.beta * tensor.nbytes, nullcontext, [tensor])

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        seconds = self.network.link.allgather(self.world_size)(output.nbytes)
        own = tensor.view(self.world_size, -1)[self.rank]
        return self.network.deliver(seconds, lambda: output.view(-1).copy_(own).mul_(self.world_size), [output, tensor])

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], tensor_sizes: Sequence[int]
    ) -> Work:
        """Others send what this worker sends itself; a piece of another size stays as it is."""
        check_sizes(output, tensor, output_sizes, tensor_sizes, self.world_size)
        own = tensor.split(list(tensor_sizes))[self.rank]
        pieces = [piece for piece in output.split(list(output_sizes)) if len(piece) == len(own)]
        link, others = self.network.link, self.world_size - 1
        sent = (tensor.numel() - tensor_sizes[self.rank]) * tensor.itemsize
        received = (output.numel() - output_sizes[self.rank]) * output.itemsize

        def echo() -> None:
            for piece in pieces:
                piece.copy_(own)

        seconds = others * link.alpha + max(sent, received) * link.beta
        return self.network.deliver(seconds, echo, [output, tensor])

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        return BehindLink(self.network, len(group_of(0, groups, self.world_size)))
