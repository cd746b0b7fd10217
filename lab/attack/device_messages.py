"""Damaged messages, read by the Triton kernels: on a CUDA device, or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.attack.apart import ApartError, run_apart
from lab.attack.messages import judged
from lab.attack.trial import Verdict

_MESSAGES, _LIMIT_S = 200, 300.0
_DAMAGED = 1  # of a window's status


class DeviceMessages:
    """Messages whose bits were changed: the device refuses what the host refuses, and reads the others as it does."""

    name = "device-message"
    what = "damaged messages of the fused path, by Triton's kernels (in its interpreter without a GPU) and by the host"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """The seed of its messages."""
        return {"messages": _MESSAGES, "seed": choice.getrandbits(32)}

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Reads them."""
        if importlib.util.find_spec("triton") is None:
            return Verdict(None, "Triton is not installed")
        place = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        work = "lab.attack.device_messages:read_damaged"
        try:
            told = run_apart(work, drawn["seed"], drawn["messages"], limit=_LIMIT_S, variables=place)
        except ApartError as error:
            return Verdict(False, f"a reader {error}")
        return judged(told, "refused alike, or the same means")


def read_damaged(seed: int, messages: int) -> dict[str, Any]:
    """Damages and reads messages of two workers.

    Returns:
        ``messages``: how many; ``refused``: how many of them; ``differ``: those that the host and the device did not
        agree on.
    """
    from lab.gpu.buffers import DEVICE
    from lab.gpu.interpreter import quicken

    if DEVICE.type == "cpu":
        quicken()
    rng = np.random.default_rng(seed)
    torch.set_num_threads(1)
    refused, differ = 0, []
    for number in range(messages):
        case = _CASES[number % len(_CASES)]
        ranks, whole = _exchanged(*case)
        reader = ranks[0]
        damaged = whole.clone()
        message = damaged.view(2, -1)[1, 4 * reader.kernels.tables.message.fields[0] :].numpy()
        for bit in rng.integers(0, 8 * len(message), (1, 1, 8, 64)[int(rng.integers(4))]):
            message[bit >> 3] ^= 1 << (bit & 7)
        ours, theirs = _by_device(reader, damaged), _by_host(reader, damaged)
        refused += theirs is None
        # a mean that is not finite stays in the gradient of both
        if (ours is None) != (theirs is None) or (ours is not None and not _same(ours, theirs)):
            differ.append(f"{case}: the device {_said(ours)}, the host {_said(theirs)}")
    return {"messages": messages, "refused": refused, "differ": differ[:20]}


#: Sizes of tensors, density, format of the values, whether tensors share quotas.
_CASES = (
    ((700, 1100), 0.1, "q4", False),
    ((700, 1100), 0.01, "q4", True),
    ((33, 2049, 1), 0.3, "fp32", False),
    ((4097,), 0.003, "bf16", False),
    ((500, 500), 0.05, "fp16", True),
)


@cache
def _exchanged(sizes: tuple[int, ...], density: float, wire: str, pooled: bool) -> tuple[list[Any], torch.Tensor]:
    """Two workers, and both of their messages, uint8."""
    from lab.gpu.buffers import Case, Rank, gather

    case = Case(sizes, density, pooled, wire=wire)
    ranks = [Rank.of(case, number, 5) for number in range(2)]
    for rank in ranks:
        accumulated, keys = rank.expected()
        message = rank.message(accumulated, keys)
        rank.memory.copy_(accumulated)
        rank.kernels.sent.copy_(message)
        rank.kernels.locate(rank.grads, None)
    gather(ranks)
    return ranks, ranks[0].kernels.received.cpu().clone()


def _by_device(rank: Any, messages: torch.Tensor) -> torch.Tensor | None:
    """float32 [N], the means; None: refused."""
    from lab.gpu.buffers import DECAY, DEVICE
    from lightning_safusion.kernels.cuda.window import WindowKernels

    before = rank.memory.clone()
    rank.kernels.received.copy_(messages)
    window = WindowKernels(DEVICE)
    rank.kernels.decode(DECAY, window.status)
    if not torch.equal(rank.memory, before):
        raise AssertionError("a message that was read has changed the residual before the window ended")
    if int(window.status) & _DAMAGED:
        return None
    return torch.cat([grad.cpu().float() for grad in rank.grads])


def _by_host(rank: Any, messages: torch.Tensor) -> torch.Tensor | None:
    """float32 [N], what gradients hold of the means; None: refused."""
    rank.exchange.messages[1].copy_(messages)
    try:
        return rank.held(rank.mean())
    except ValueError:
        return None


def _same(ours: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    return (
        theirs is not None
        and torch.equal(ours.isfinite(), theirs.isfinite())
        and torch.equal(ours.where(ours.isfinite(), 0.0), theirs.where(theirs.isfinite(), 0.0))
    )


def _said(means: torch.Tensor | None) -> str:
    return "refuses" if means is None else "reads"
