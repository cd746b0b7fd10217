"""Two lanes for one buffer: an all-reduce of dense tensors, an all-gather of selections (ADTopk, SSFusion)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce, lane_spec
from lightning_safusion.comm.exchange import Ability, Part, SpanSpec
from lightning_safusion.comm.transport.interface import JoinedWork, Transport, Work
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.sparsify.selection.view import device_constant


class HybridExchange(SparseAllGather):
    """The dense tensors of a buffer by all-reduce, the others by all-gather, on a communicator each.

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
        self._dense_tensors = spec.dense_tensors
        self._places = device_constant(np.array(self._dense_tensors, np.int64), device)
        self._dense = DenseAllReduce(lane_spec(spec, self._dense_tensors), reduce, device)
        self.bytes_sent += self._dense.bytes_sent
        self.bytes_received += self._dense.bytes_received
        self._begun = False

    def begin(self, x: Tensor, part: Part) -> None:
        absent = [place for place, tensor in enumerate(self._dense_tensors) if tensor in set(part.absent)]
        self._dense.encode(torch.cat(self.dense_runs(x)), Part(None, part.flags[self._places], absent))
        self._dense_work = self._dense.start()
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
        self._dense.copy_to(self.dense_runs(mean))
        return mean

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        return None

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return self._dense.sent_dense(start, stop, x)
