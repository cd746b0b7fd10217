"""Checksums of named tensors, equal exactly where the bits are (up to chance), and where those of ranks differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Whole words of at most 32 bits: in sums modulo 2^64, two flipped sign bits of 64-bit words would cancel.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_CHUNK = 1 << 16  # words: what is computed of them stays in a cache
_SEED = 2718281828
_STEP = 6364136223846793005  # odd: the place of a chunk counts


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """int64 [_CHUNK] of odd numbers: a difference in a single word never vanishes."""
    generator = torch.Generator().manual_seed(_SEED)
    limits = torch.iinfo(torch.int64)
    return (torch.randint(limits.min, limits.max, (_CHUNK,), generator=generator) | 1).to(device)


def raw_bytes(tensor: Tensor) -> Tensor:
    """uint8, the bytes of the elements in logical order; a view if they lie so in memory."""
    return _flat(tensor).view(torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)


def checksum(tensor: Tensor) -> Tensor:
    """int64 scalar on the device of the tensor: sums modulo 2^64 of its words, weighted by position.

    Tensors of one shape and dtype have equal checksums if their bits are equal, NaNs included. Others collide with a
    probability below 2^-32; they never do if they differ in one word.
    """
    flat = _flat(tensor)
    words = flat.view(_WORDS[flat.itemsize])
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK) if len(words) else ():
        total = total * _STEP + (weights[: len(chunk)] * chunk).sum()
    return total


@dataclass(frozen=True)
class Checksums:
    """Of all tensors of one rank.

    Args:
        kinds: By name: shape, dtype and checksum.
    """

    kinds: dict[str, tuple[tuple[int, ...], str, int]]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Checksums:
        """Of named tensors; waits once for each device that they are on."""
        named = list(tensors)
        values = {device: iter(_read(named, device)) for device in {tensor.device for _, tensor in named}}
        return cls({name: (tuple(t.shape), str(t.dtype), next(values[t.device])) for name, t in named})

    def digest(self) -> int:
        """One number for all of them, their names, shapes and dtypes, whatever their order; from 0 to 2^56 - 1."""
        text = repr(sorted(self.kinds.items()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _read(named: Sequence[tuple[str, Tensor]], device: torch.device) -> list[int]:
    return torch.stack([checksum(tensor) for _, tensor in named if tensor.device == device]).tolist()


@dataclass(frozen=True)
class Difference:
    """The first tensor that is not the same on all ranks.

    Args:
        name: Of the tensor.
        ranks: Ranks that differ from the most common version, or from the first rank's among equally common ones.
        others: Ranks that have that version.
        comparable: All ranks have it, in one shape and dtype.
        count: Tensors that differ in all.
        total: Tensors compared.
    """

    name: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    comparable: bool
    count: int
    total: int


def first_difference(checksums: Sequence[Checksums]) -> Difference:
    """Says where ranks differ.

    Args:
        checksums: In rank order.

    Raises:
        ValueError: If they do not.
    """
    names = list(dict.fromkeys(name for each in checksums for name in each.kinds))
    versions = {name: [each.kinds.get(name) for each in checksums] for name in names}
    differing = [name for name in names if len(set(versions[name])) > 1]
    if not differing:
        raise ValueError(f"the checksums of {len(checksums)} ranks are equal: compare their digests first")
    held = versions[differing[0]]
    common = max(held, key=held.count)
    ranks = tuple(rank for rank, version in enumerate(held) if version != common)
    others = tuple(rank for rank, version in enumerate(held) if version == common)
    comparable = None not in held and len({version[:2] for version in held if version is not None}) == 1
    return Difference(differing[0], ranks, others, comparable, len(differing), len(names))


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape and dtype; NaN where only one of them is NaN."""
    if not ours.numel():
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.detach().to(wide), theirs.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max())
