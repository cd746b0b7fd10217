"""Two lanes for one buffer: an all-reduce of dense tensors, an all-gather of selections (ADTopk, SSFusion)."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce
from lightning_safusion.comm.exchange import Part, SpanSpec, StreamOrderedExchange, Verdict, all_finite
from lightning_safusion.comm.transport.interface import JoinedWork, Transport
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.selection.view import device_constant


class HybridExchange(StreamOrderedExchange):
    """The dense tensors of a buffer by all-reduce, the others by all-gather, on a communicator each.

    The all-reduce begins before the selection (:meth:`begin`) and runs beside it, and beside the all-gather. On each
    communicator, exchanges begin in the order of the buffers, the same on all ranks. A dense tensor in an all-gather
    would cost every worker ``(n - 1)`` times its bytes, here ``2 (n - 1) / n`` times.

    What ranks say of the tensors is in the messages of the all-gather. The released code of ADTopk and SSFusion never
    launches its all-reduce.

    Args:
        spec: Shape of the exchange; needs tensors of both kinds.
        gather: Communicator of selections.
        reduce: Communicator of dense tensors.
        device: Where the span lives.
        codec: Wire format of the selection.
    """

    few_bits = True
    begins_early = True

    def __init__(
        self, spec: SpanSpec, gather: Transport, reduce: Transport, device: torch.device, codec: Codec
    ) -> None:
        super().__init__(spec, gather, device)
        self._sparse = SparseAllGather(SpanSpec(spec.numel, spec.capacity, spec.edges, ()), gather, device, codec)
        runs = spec.dense_runs
        spans = enumerate(pairwise(spec.edges))
        self._whole = [t for t, (a, b) in spans if a < b and any(start <= a and b <= stop for start, stop, _ in runs)]
        self._places = device_constant(np.array(self._whole, np.int64), device)
        edges = [0, *accumulate(spec.edges[t + 1] - spec.edges[t] for t in self._whole)]
        cuts = [0, *accumulate(stop - start for start, stop, _ in runs)]
        packed = tuple((a, b, dtype) for (a, b), (_, _, dtype) in zip(pairwise(cuts), runs, strict=True))
        self._dense = DenseAllReduce(SpanSpec(edges[-1], 0, tuple(edges), packed), reduce, device)
        self._begun = False

    @property
    def bytes_sent(self) -> int:
        return self._sparse.bytes_sent + self._dense.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._sparse.bytes_received + self._dense.bytes_received

    def begin(self, x: Tensor, part: Part) -> None:
        self._pack_dense(x, part)
        self._dense.start()
        self._begun = True

    def _pack_dense(self, x: Tensor, part: Part) -> None:
        pieces = torch.cat(self.dense_runs(x))
        absent = [place for place, tensor in enumerate(self._whole) if tensor in set(part.absent)]
        self._dense.encode(pieces, Part(None, part.flags[self._places], absent))

    def encode(self, x: Tensor, part: Part) -> None:
        if not self._begun:
            self._pack_dense(x, part)
        self._sparse.encode(x, part)

    def start(self) -> None:
        if not self._begun:
            self._dense.start()
        self._begun = False
        self._sparse.start()
        self.work = JoinedWork([work for work in (self._dense.work, self._sparse.work) if work is not None])

    @property
    def headers(self) -> Tensor:
        return self._sparse.headers

    def verdict(self, headers: Tensor | None = None) -> Verdict:
        return self._sparse.verdict(headers)

    def standing(self) -> tuple[Tensor, Tensor]:
        return self._sparse.standing()

    def decode(self, scratch: Tensor) -> Tensor:
        mean = self._sparse.decode(scratch)
        pieces = self._dense.decode(scratch[:0])
        runs = self.dense_runs(mean)
        torch._foreach_copy_(runs, list(pieces.split([len(run) for run in runs])))
        return mean

    def is_finite(self, mean: Tensor) -> bool:
        return self._sparse.is_finite(mean) and all(map(all_finite, self.dense_runs(mean)))

    def poison(self, mean: Tensor, bad: Tensor) -> None:
        self._sparse.poison(mean, bad)

    def release(self, scratch: Tensor) -> None:
        self._sparse.release(scratch)
        torch._foreach_zero_(self.dense_runs(scratch))

    def sent(self) -> tuple[Tensor, Tensor]:
        return self._sparse.sent()

    def sent_message(self) -> native.Message | None:
        return self._sparse.sent_message()

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return self._dense.sent_dense(start, stop, x)
