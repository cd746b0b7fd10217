"""Damaged messages of every wire format, read by the compiled kernels and by NumPy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.attack.apart import ROOT, ApartError, run_apart, sanitized
from lab.attack.trial import Verdict
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import available_wires, resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection

_MESSAGES, _PER_SHAPE = 20_000, 25
_LIMIT_S, _GUARD = 600.0, 1024
_LARGEST = 20_000
WIRES = [wire for wire in available_wires() if "-" in wire]


class DamagedMessages:
    """Thousands of messages whose bits, bytes and fields were changed: both readers refuse one, or read it alike."""

    name = "message"
    what = f"damaged messages of {len(WIRES)} wire formats, by compiled kernels (AddressSanitizer, UBSan) and by NumPy"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """The seed of its messages."""
        return {"messages": _MESSAGES, "seed": choice.getrandbits(32)}

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Reads them."""
        if not native.usable():
            return Verdict(None, "the package was installed without a C compiler")
        watched = sanitized()
        root, variables = watched or (ROOT, {})
        try:
            told = run_apart(
                "lab.attack.messages:read_damaged",
                drawn["seed"],
                drawn["messages"],
                limit=_LIMIT_S,
                root=root,
                variables=variables,
            )
        except ApartError as error:
            return Verdict(False, f"a reader {error}")
        how = "no report" if watched else "without sanitizers, which the compiler lacks"
        return judged(told, f"refused alike, or read alike inside of bounds; {how}")


def judged(told: Mapping[str, Any], well: str) -> Verdict:
    """What readers have told of damaged messages: those that they read in two ways are faults."""
    if told["differ"]:
        return Verdict(False, f"{len(told['differ'])} read in two ways, first {told['differ'][0]}")
    return Verdict(True, well, told["messages"])


def read_damaged(seed: int, messages: int) -> dict[str, Any]:
    """Damages and reads messages.

    Returns:
        ``messages``: how many; ``refused``: how many of them; ``differ``: those that the readers did not agree on, each
        with its format, shape and kind of damage.
    """
    rng = np.random.default_rng(seed)
    made, refused, differ = 0, 0, []
    while made < messages:
        codec = _codec(rng)
        if codec is None:
            continue
        for _ in range(_PER_SHAPE):
            count = int(rng.integers(0, codec.capacity + 1))
            message = _message(codec, count, rng)
            kind = _damage(message.numpy(), codec, rng)
            (ours, span), (theirs, other) = (_read(codec, message, compiled) for compiled in (True, False))
            made += 1
            refused += theirs == "refused"
            if ours != theirs or not torch.equal(span.view(torch.int32), other.view(torch.int32)):
                differ.append(f"{codec.name}, {codec.capacity} of {codec.numel}, {kind}: {ours}, {theirs}")
    return {"messages": made, "refused": refused, "differ": differ[:20]}


def _codec(rng: np.random.Generator) -> Codec | None:
    """Any format, of any span; None if the format does not go with the span."""
    numel = int(np.exp(rng.uniform(0, np.log(_LARGEST))))
    cuts = np.sort(rng.integers(0, numel + 1, int(rng.integers(0, 5)))).tolist()
    capacity = int(rng.integers(0, numel + 1) if rng.random() < 0.3 else numel * 10 ** rng.uniform(-3, 0))
    try:
        return resolve_codec(WIRES[int(rng.integers(len(WIRES)))], numel, capacity, torch.float32, (0, *cuts, numel))
    except ValueError:
        return None


def _message(codec: Codec, count: int, rng: np.random.Generator) -> Tensor:
    indices = torch.from_numpy(np.sort(rng.choice(codec.numel, count, replace=False)).astype(np.int64))
    values = torch.from_numpy(rng.standard_normal(count).astype(np.float32))
    message = torch.zeros(codec.nbytes, dtype=torch.uint8)
    codec.encode(Selection(indices, values, count), message)
    return message


def _damage(message: np.ndarray, codec: Codec, rng: np.random.Generator) -> str:
    """Changes a message in place; says how."""
    kind = ("bit", "bits", "field", "ones", "noise", "rolled", "end", "field of ones")[int(rng.integers(8))]
    if not len(message):
        return kind
    fields = list(pairwise(np.cumsum((0, *codec.field_bytes)).tolist()))
    start, stop = fields[int(rng.integers(len(fields)))]
    if kind in ("bit", "bits"):
        for bit in rng.integers(0, 8 * len(message), 1 if kind == "bit" else 8):
            message[bit >> 3] ^= 1 << (bit & 7)
    elif kind in ("field", "field of ones"):
        message[start:stop] = rng.integers(0, 256, stop - start) if kind == "field" else 255
    elif kind == "ones":
        message[:] = 255
    elif kind == "noise":
        message[:] = rng.integers(0, 256, len(message))
    elif kind == "rolled":
        message[:] = np.roll(message, int(rng.integers(len(message))))
    else:  # what came too short
        message[int(rng.integers(len(message))) :] = 0
    return kind


def _read(codec: Codec, message: Tensor, compiled: bool) -> tuple[str, Tensor]:
    """What becomes of a message: "read" and the span (float32, NaN as one), or "refused" and zeros.

    Raises:
        AssertionError: If the reader has written outside of the span.
    """
    room = torch.full((codec.numel + 2 * _GUARD,), 7.0)
    span = room[_GUARD : _GUARD + codec.numel]
    said = "read"
    with contextlib.nullcontext() if compiled else native.unused():
        try:
            inbox = codec.inbox(message[None]) if compiled else None
            if inbox is not None:
                native.mean_into([span], native.Parts.between([0, codec.numel]), inbox(), 1.0)
            else:
                positions, values = codec.reader(message)(0, codec.numel)
                span.zero_()
                span[positions] += values
        except ValueError:
            said = "refused"
    if not bool((room[:_GUARD] == 7).all()) or not bool((room[_GUARD + codec.numel :] == 7).all()):
        raise AssertionError(f"{codec.name}: written outside of the span")
    return said, torch.zeros(codec.numel) if said == "refused" else torch.where(span.isnan(), torch.nan, span)
