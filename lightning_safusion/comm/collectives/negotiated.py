"""Buffers of a fixed capacity that every worker fills at its own pace (SAFusion, naive system; HPDC'25, section 3).

Workers keep different numbers of elements, so a buffer closes after different tensors on different workers. Messages
are matched by their number alone: round ``j`` of one worker meets round ``j`` of every other, whatever they hold,
because each entry carries its place in the whole gradient space. A worker that has sent everything sends empty messages
until all have.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Exchange, Part, SpanSpec, Verdict, aligned, saturated
from lightning_safusion.comm.transport.interface import LaterWork, Transport, Work
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.comm.wire.values import Values
from lightning_safusion.kernels.fields import FIELD_BYTES
from lightning_safusion.sparsify.base import Selection


class Stream:
    """The rounds of one backward window.

    Message: ``[flags of all tensors | done | notices | entries]``; the flags are complete in a message with ``done``.

    Args:
        transport: A communicator of its own: ranks launch at their own pace.
        edges: int64 [L + 1], element edges of all tensors.
        capacity: Entries that a buffer holds; at most the elements of all tensors.
        values: Format of values on the wire; floats.
        device: Where the gradients live.
    """

    def __init__(
        self, transport: Transport, edges: np.ndarray, capacity: int, values: Values, device: torch.device
    ) -> None:
        self.transport = transport
        self.edges = edges
        self.capacity = capacity
        self.value_dtype = values.dtype
        self.device = device
        self._codec: Codec = resolve_codec(f"coo-{values.name}", int(edges[-1]), capacity, values.dtype)
        self._tensors = len(edges) - 1
        self._entries_at = aligned(self._tensors + 2, FIELD_BYTES)
        self._nbytes = aligned(self._entries_at + self._codec.nbytes)
        self._mean = torch.zeros(int(edges[-1]), dtype=torch.float32, device=device)
        self._pool: list[Tensor] = []  # uint8 [1 + world_size, bytes] of each round: what is sent, and received
        self.bytes_sent = 0  # by this rank in the last window
        self._begin()

    def _begin(self) -> None:
        self._rounds: list[tuple[Tensor, Work]] = []  # uint8 [world_size, bytes], the messages received
        self._indices: list[Tensor] = []
        self._values: list[Tensor] = []
        self._waiting = 0
        self._flags = np.zeros(self._tensors, np.uint8)
        self._notices = 0
        self._verdict: np.ndarray | None = None  # of a window that has ended

    def append(self, tensor: int, selection: Selection, flag: int, notices: int) -> Tensor:
        """Queues this rank's elements of the tensor at a place, at positions in it; launches every buffer that is full.

        Returns:
            float32 [count], the values as they will be decoded.
        """
        if self._verdict is not None:
            self._begin()
        count = int(selection.count)
        values = saturated(selection.values[:count], self.value_dtype).to(self.value_dtype).to(torch.float32)
        self._flags[tensor] = flag
        self._notices |= notices
        self._indices.append(selection.indices[:count] + int(self.edges[tensor]))
        self._values.append(values)
        self._waiting += count
        while self._waiting >= self.capacity:
            self._launch(done=False)
        return values

    def _launch(self, done: bool) -> None:
        indices, values = torch.cat(self._indices), torch.cat(self._values)
        taken = min(self.capacity, self._waiting)
        self._indices, self._values = [indices[taken:]], [values[taken:]]
        self._waiting -= taken
        number = len(self._rounds)
        if number == len(self._pool):
            shape = 1 + self.transport.world_size, self._nbytes
            self._pool.append(torch.zeros(shape, dtype=torch.uint8, device=self.device))
        send, received = self._pool[number][0], self._pool[number][1:]
        header = np.concatenate([self._flags, np.array([done and self._waiting == 0, self._notices], np.uint8)])
        send[: self._tensors + 2].copy_(torch.from_numpy(header))
        self._codec.encode(Selection(indices[:taken], values[:taken], taken), self._entries(send), echo=False)
        self._rounds.append((received, self.transport.all_gather(received.view(-1), send)))

    def finish(self) -> np.ndarray:
        """Sends the rest and takes part until every rank is done, adding all entries up, rank by rank.

        Returns:
            uint8 [world_size, L + 2]: of every rank the flags of all tensors, 1 (done), and its notices.
        """
        number, scale = 0, 1.0 / self.transport.world_size
        while self._verdict is None:
            if number == len(self._rounds):
                self._launch(done=True)
            received, work = self._rounds[number]
            work.wait()
            for message in received:
                indices, values = self._codec.decode(self._entries(message))
                self._mean.scatter_add_(0, indices, values * scale)
            headers = received[:, : self._tensors + 2].cpu().numpy()
            number += 1
            if headers[:, -2].all():
                self._verdict, self.bytes_sent = headers.copy(), number * self._nbytes
        return self._verdict

    def _entries(self, message: Tensor) -> Tensor:
        return message[self._entries_at : self._entries_at + self._codec.nbytes]

    def mean(self, tensor: int) -> Tensor:
        """float32 view of one tensor's mean."""
        return self._mean[int(self.edges[tensor]) : int(self.edges[tensor + 1])]


class StreamedTensor(Exchange):
    """One tensor's part in a stream.

    Args:
        spec: Its span.
        stream: The stream of the window.
        place: Place of the tensor.
    """

    def __init__(self, spec: SpanSpec, stream: Stream, place: int) -> None:
        super().__init__(spec, stream.transport, stream.device)
        self.stream = stream
        self.place = place
        self._packed = (self._nothing, 0, 0)
        self._values = self._nothing.values

    def encode(self, x: Tensor, part: Part) -> None:
        selection = None if part.absent else part.selection
        if self.spec.dense_runs and not part.absent:
            selection = Selection(torch.arange(self.spec.numel, device=self.device), x, self.spec.numel)
        self._packed = (self._nothing if selection is None else selection, int(part.flags[0]), part.notices)

    def start(self) -> Work:
        selection, flag, notices = self._packed
        self._values = self.stream.append(self.place, selection, flag, notices)
        if not self.spec.dense_runs:
            self._sent = (selection.indices[: len(self._values)], self._values)
        return LaterWork(self._finish)

    def advance(self, wait: bool) -> bool:
        if wait:
            self.stream.finish()
        return True

    def _finish(self) -> None:
        self.stream.finish()
        if self.place == 0:  # buffers are shared by all tensors: the first one accounts for them
            self.bytes_sent = self.stream.bytes_sent
            self.bytes_received = self.bytes_sent * (self.transport.world_size - 1)

    def verdict(self) -> Verdict:
        return Verdict.of(self.stream.finish()[:, [self.place, -1]])

    def decode(self, scratch: Tensor) -> Tensor:
        return self.stream.mean(self.place)

    def release(self, scratch: Tensor) -> None:
        self.stream.mean(self.place).zero_()

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return self._values[start:stop]
