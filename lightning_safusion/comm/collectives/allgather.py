"""Sparse all-gather: one message per rank, decoded rank by rank; dense tensors travel in it or have their own lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allreduce import DenseLane
from lightning_safusion.comm.exchange import Ability, Part, SpanSpec, StreamOrderedExchange, aligned, saturated
from lightning_safusion.comm.transport.interface import JoinedWork, Transport, Work
from lightning_safusion.comm.wire.codec import Codec, spread
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cuda.tables import Message
from lightning_safusion.kernels.fields import FIELD_BYTES


class SparseAllGather(StreamOrderedExchange):
    """One packed message per rank and buffer: ``[flags | notices | dense lanes by run | selection]``.

    Volume per worker: ``(world_size - 1) * message`` bytes received (recursive doubling or ring).

    Args:
        spec, transport, device: See :class:`Exchange`.
        codec: Wire format of the selection; None if the whole span is dense.
    """

    ability = Ability(few_bits=True)
    #: Formats that compiled kernels cannot read are decoded for them: this many entries of all ranks at a time, since
    #: decoded entries take several times the bytes of messages,
    decoded_together: ClassVar[int] = 1 << 19
    #: but not of fewer elements than these.
    least_piece: ClassVar[int] = 1 << 16

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device, codec: Codec | None) -> None:
        super().__init__(spec, transport, device)
        self.codec = codec
        workers, tensors = transport.world_size, spec.num_tensors
        sizes = [tensors + 1, *((stop - start) * dtype.itemsize for start, stop, dtype in spec.dense_runs)]
        sizes = [aligned(size, FIELD_BYTES) for size in sizes]
        self._offsets = list(accumulate(sizes, initial=0))
        coded = 0 if codec is None else codec.nbytes
        self._selection = slice(self._offsets[-1], self._offsets[-1] + coded)
        self.bytes_sent = aligned(self._offsets[-1] + coded)
        self.bytes_received = self.bytes_sent * (workers - 1)
        # zeros, not empty: alignment gaps are sent too, and every byte that is sent is written
        self._send = torch.zeros(self.bytes_sent, dtype=torch.uint8, device=device)
        self._received = torch.zeros(self.bytes_sent * workers, dtype=torch.uint8, device=device)
        self._flags, self._notices = self._send[:tensors], self._send[tensors]
        self._lanes = self._lane_views(self._send)
        self._exact_lanes = all(dtype == torch.float32 for _, _, dtype in spec.dense_runs)
        messages = self._received.view(workers, self.bytes_sent)
        self._messages = list(messages.unbind())
        self._received_lanes = [self._lane_views(message) for message in self._messages]
        self.headers = messages[:, : tensors + 1]
        on_host = device.type == "cpu"
        self._write = None if codec is None else codec.outbox(self._send[self._selection])
        self._inbox = codec.inbox(messages[:, self._selection]) if codec is not None and on_host else None
        self._read: native.Together[native.Message] | None = None  # of this window, by compiled kernels
        # On the host the message can be read again: entries take several times its bytes. On an accelerator that would
        # be more launches.
        self._reads_again = codec is not None and on_host

    def message_format(self) -> Message | None:
        """The fields of a message, for kernels that write and read all of it; None if they cannot."""
        header = self._offsets[1]
        if self.codec is None:
            return Message(0, 0, 0, (0, 0, 0, 0, 0), self.bytes_sent, header, None)
        if not isinstance(self.codec, EliasFanoCodec):
            return None
        edges = np.asarray(self.spec.edges, np.int64)
        return self.codec.message(edges[:-1], edges[1:], self.bytes_sent, self._offsets[-1], header)

    def lane_places(self) -> np.ndarray:
        """int64 [T], bytes of a message before the values of each dense tensor, -1 for others."""
        places = np.full(self.spec.num_tensors, -1)
        for tensor in self.spec.dense_tensors:
            first = self.spec.edges[tensor]
            run = next(i for i, (start, stop, _) in enumerate(self.spec.dense_runs) if start <= first < stop)
            start, _, dtype = self.spec.dense_runs[run]
            places[tensor] = self._offsets[1 + run] + (first - start) * dtype.itemsize
        return places

    @property
    def messages(self) -> tuple[Tensor, Tensor]:
        """This rank's message and those of all ranks, uint8."""
        return self._send, self._received

    @property
    def selection(self) -> Tensor:
        """uint8, what this rank's message has of selected elements."""
        return self._send[self._selection]

    def _lane_views(self, message: Tensor) -> list[Tensor]:
        return [
            message[offset : offset + (stop - start) * dtype.itemsize].view(dtype)
            for offset, (start, stop, dtype) in zip(self._offsets[1:], self.spec.dense_runs, strict=False)
        ]

    def encode(self, x: Tensor, part: Part) -> None:
        self._flags.copy_(part.flags)
        self._notices.fill_(part.notices)
        if self._lanes:
            spec = self.spec
            pieces = [saturated(x[start:stop], dtype) for start, stop, dtype in spec.dense_runs]
            torch._foreach_copy_(self._lanes, pieces)
            for tensor in part.absent:
                start, stop = spec.edges[tensor : tensor + 2]
                for lane, (first, last, _) in zip(self._lanes, spec.dense_runs, strict=True):
                    if first <= start and stop <= last:
                        lane[start - first : stop - first] = 0
        if self._write is not None:
            selection = self._nothing if part.selection is None else part.selection
            values = self._write(selection, not self._reads_again)
            if not self._reads_again:
                self._sent = (spread(selection.indices, selection.count), values)

    def start(self) -> Work:
        self._read = None
        return self.transport.all_gather(self._received, self._send)

    def decode(self, scratch: Tensor) -> Tensor:
        scale = 1.0 / self.transport.world_size
        runs = self.dense_runs(scratch)
        self._written = []
        for message, lanes in zip(self._messages, self._received_lanes, strict=True):
            if lanes:
                # rounded twice, as kernels do: with `alpha` it depends on the processor
                torch._foreach_add_(runs, [lane.float() * scale for lane in lanes])
            if self.codec is not None:
                # indices are unique within a rank, so the order of additions to an element is the order of ranks
                indices, values = self.codec.decode(message[self._selection])
                scratch.scatter_add_(0, indices, values * scale)
                self._note_written(indices)
        return scratch

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        if not self._exact_lanes or not native.serves(*gradients):
            return None
        scale, finite = 1.0 / self.transport.world_size, True
        if self.codec is not None:
            tensors, parts = self._sparse_parts
            sparse = gradients if len(tensors) == len(gradients) else [gradients[t] for t in tensors]
            if self._inbox is None:
                finite = native.mean_by_pieces(sparse, parts, partial(self._decoded, self.codec), scale, self._piece)
            else:
                self._read = self._inbox()
                finite = native.mean_into(sparse, parts, self._read, scale)
        if self._lanes:
            tensors, parts, lanes = self._dense_parts
            dense = gradients if len(tensors) == len(gradients) else [gradients[t] for t in tensors]
            finite &= native.mean_into(dense, parts, lanes, scale)
        return finite

    def _decoded(self, codec: Codec, start: int, stop: int) -> native.Together[native.Message]:
        readers = [codec.reader(message[self._selection]) for message in self._messages]
        return native.Together([native.Message.decoded(*read(start, stop)) for read in readers])

    @cached_property
    def _piece(self) -> int:
        entries = self.transport.world_size * max(self.spec.capacity, 1)
        return max(self.least_piece, self.decoded_together * self.spec.numel // entries)

    @cached_property
    def _sparse_parts(self) -> tuple[list[int], native.Parts]:
        return self.spec.sparse_parts(self._piece)

    @cached_property
    def _dense_parts(self) -> tuple[list[int], native.Parts, native.Together[native.Message]]:
        """Dense tensors, where they lie in a message of float32 numbers, and the messages of all ranks as such."""
        tensors, sizes = self.spec.dense_tensors, np.diff(self.spec.edges)
        messages = [native.Message.dense(message.view(torch.float32)) for message in self._messages]
        return tensors, native.Parts.of(self.lane_places()[tensors] // 4, sizes[tensors]), native.Together(messages)

    def sent(self) -> tuple[Tensor, Tensor]:
        return self.codec.decode(self._send[self._selection]) if self._reads_again and self.codec else self._sent

    def sent_message(self) -> native.Message | None:
        if self._read is None and self._inbox is not None and native.usable():
            self._read = self._inbox()
        return None if self._read is None else self._read.messages[self.transport.rank]

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        dtype = next(d for a, b, d in self.spec.dense_runs if a <= start and stop <= b)
        return saturated(x[start:stop], dtype).to(dtype).to(torch.float32)


class HybridExchange(SparseAllGather):
    """The dense tensors of a buffer by all-reduce, the others by all-gather, on a communicator each (ADTopk, SSFusion).

    The all-reduce begins before the selection (:meth:`begin`) and runs beside it, and beside the all-gather. On each
    communicator, exchanges begin in the order of the buffers, the same on all ranks. A dense tensor in an all-gather
    would cost every worker ``(n - 1)`` times its bytes, here ``2 (n - 1) / n`` times.

    The flags of all tensors are in the messages of the all-gather. The released code of ADTopk and SSFusion never
    launches its all-reduce.

    Args:
        spec, device: See :class:`Exchange`; needs tensors of both kinds.
        gather: Communicator of selections.
        reduce: Communicator of dense tensors.
        codec: Wire format of the selection.
    """

    ability = Ability(few_bits=True, begins_early=True)

    def __init__(
        self, spec: SpanSpec, gather: Transport, reduce: Transport, device: torch.device, codec: Codec
    ) -> None:
        super().__init__(replace(spec, dense_runs=()), gather, device, codec)
        self.spec = spec  # of both lanes
        self.lane = DenseLane(spec, reduce, device, flagged=False)
        self.bytes_sent += self.lane.bytes_sent
        self.bytes_received += self.lane.bytes_received
        self._begun = False

    def begin(self, x: Tensor, part: Part) -> None:
        self.lane.encode(x, part)
        self._dense_work = self.lane.start()
        self._begun = True

    def encode(self, x: Tensor, part: Part) -> None:
        if not self._begun:  # this rank has failed before
            self.begin(x, part)
        self._begun = False
        super().encode(x, part)

    def start(self) -> Work:
        return JoinedWork([self._dense_work, super().start()])

    def decode(self, scratch: Tensor) -> Tensor:
        mean = super().decode(scratch)
        self.lane.copy_to(mean)
        return mean

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        return None

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return self.lane.sent_dense(start, stop, x)
