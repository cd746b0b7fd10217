"""Several messages of one worker, written together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection


class Mailing:
    """Messages on the host, each for other entries of a span, written again in every step.

    Args:
        codecs: The format of each.
        memory: uint8 [nbytes], 4-byte aligned, where each lies.
    """

    def __init__(self, codecs: Sequence[Codec], memory: Sequence[Tensor]) -> None:
        self._messages = list(zip(codecs, memory, strict=True))
        outgoing = [codec.outgoing(out) for codec, out in self._messages]
        known = [each for each in outgoing if each is not None]
        self._outgoing = known if len(known) == len(outgoing) else None

    def write(self, positions: np.ndarray, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Writes every byte of all messages.

        Args:
            positions: int32 or int64 [K], those of one message behind those of the one before, ascending in each.
            values: float32 [K].
            counts: int64, entries of each message.

        Returns:
            float32 [K], the values as their receivers will decode them.

        Raises:
            ValueError: If a message has too many entries, or positions that it cannot hold.
        """
        if self._outgoing is not None and native.usable():
            sent = native.write_messages(positions, values, counts, self._outgoing)
            if sent is not None:
                return sent
        numbers = counts.tolist()
        parts = zip(*(torch.from_numpy(each).split(numbers) for each in (positions, values)), strict=True)
        chosen = [Selection(where.long(), what, len(where)) for where, what in parts]
        pairs = zip(self._messages, chosen, strict=True)
        coded = [codec.encode(selection, out).numpy() for (codec, out), selection in pairs]
        return np.concatenate([np.empty(0, np.float32), *coded])
