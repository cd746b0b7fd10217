"""Messages with checksums whose bits are flipped on their way: none of them is read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.attack.trial import Verdict
from lightning_safusion.comm.transport.interface import FinishedWork, Work
from lightning_safusion.comm.transport.sealed import SealedTransport
from lightning_safusion.comm.transport.torch_backend import SoloTransport

_MESSAGES, _LONGEST = 20_000, 5000


class FlippedMessages:
    """A sealed message with one to three flipped bits, a run of up to 32 wrong ones, or noise in its place."""

    name = "checksum"
    what = 'messages of `integrity="checksum"` with flipped bits, bursts or noise'

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """The seed of its messages."""
        return {"messages": _MESSAGES, "seed": choice.getrandbits(32)}

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Sends them."""
        missed = missed_damage(drawn["seed"], drawn["messages"])
        well = "all refused, and zeros in their place"
        return Verdict(not missed, f"{missed} were read" if missed else well, drawn["messages"])


class _Noisy(SoloTransport):
    """Changes what it carries."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor)
        message = output.numpy()
        kind = int(self.rng.integers(5))
        if kind == 4:
            message[:] = self.rng.integers(0, 256, len(message))
            message[0] ^= message[0] == tensor.numpy()[0]
            return FinishedWork()
        bits = self.rng.choice(8 * len(message), kind + 1, replace=False)
        if kind == 3:  # a burst
            start = int(self.rng.integers(8 * len(message) - 32))
            bits = start + np.flatnonzero(np.r_[True, self.rng.integers(0, 2, 31) > 0])
        for bit in bits:
            message[bit >> 3] ^= 1 << (bit & 7)
        return FinishedWork()


def missed_damage(seed: int, messages: int) -> int:
    """How many of so many damaged messages were read."""
    rng = np.random.default_rng(seed)
    transport, missed = SealedTransport(_Noisy(rng)), 0
    for _ in range(messages):
        message = torch.from_numpy(rng.integers(0, 256, int(rng.integers(1, _LONGEST)), dtype=np.uint8))
        arrived = torch.full_like(message, 7)
        transport.all_gather(arrived, message).wait()
        missed += transport.take_damage() != [0] or bool(arrived.any())
    return missed
