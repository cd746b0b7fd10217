"""Megabytes of source text that every machine with torch has: its C++ headers, CUDA's, and Python, split by file."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lab.tasks.data import Text

_SUFFIXES = (".h", ".hpp", ".cuh", ".py")
# One file in so many is held out, by the first byte of the hash of its name.
_HELD_OUT = 16
#: Bytes that are trained on and held out, at most; half as many must be there.
TRAINING_BYTES, HELD_OUT_BYTES = 64 << 20, 2 << 20


class Source(NamedTuple):
    """A file.

    Args:
        key: Hash of its name: the part of its path below the last folder ``include``, or else below its root. Versions
            of one header in several packages share a name, and so are all trained on or all held out.
        path: Where it is.
    """

    key: bytes
    path: Path

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on; the same on all machines."""
        return self.key[0] % _HELD_OUT == 0


def source_roots() -> tuple[Path, ...]:
    """Python's standard library, and the packages torch, triton and nvidia (CUDA's headers)."""
    packages = Path(torch.__file__).parents[1]
    return Path(sysconfig.get_paths()["stdlib"]), *(packages / name for name in ("torch", "triton", "nvidia"))


def source_files(roots: Sequence[Path]) -> list[Source]:
    """Headers and Python files in the order of their hashes, which mixes all folders."""
    found = []
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each not in ("site-packages", "dist-packages")]
            for path in (Path(folder) / file for file in files if file.endswith(_SUFFIXES)):
                name = f"/{path.relative_to(root).as_posix()}".rpartition("/include/")[2]
                found.append(Source(hashlib.sha256(name.encode()).digest(), path))
    return sorted(found, key=lambda source: (source.key, str(source.path)))


def split_text(files: Sequence[Source], training: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones, uint8 vectors. Of files with the same content the first is taken.

    Args:
        files: In the order in which they are taken.
        training: Bytes to train on, at most; half as many must be there.
        held_out: The same of what is held out.

    Raises:
        FileNotFoundError: If there is less text.
    """
    limits, texts = (training, held_out), (bytearray(), bytearray())
    seen: set[bytes] = set()
    for source in files:
        side = int(source.held_out)
        if len(texts[side]) >= limits[side]:
            continue
        content = source.path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest not in seen:
            seen.add(digest)
            texts[side].extend(content)
    for text, limit, what in zip(texts, limits, ("train on", "hold out"), strict=True):
        if len(text) < limit / 2:
            raise FileNotFoundError(
                f"{len(text):,} bytes of source text to {what} in {len(files):,} files, at least {limit // 2:,} are "
                "needed: use a torch with its headers and a Python with its sources"
            )
    first, second = (
        torch.from_numpy(np.frombuffer(bytes(text[:limit]), np.uint8).copy())
        for text, limit in zip(texts, limits, strict=True)
    )
    return first, second


@cache
def source_text(training: int = TRAINING_BYTES, held_out: int = HELD_OUT_BYTES) -> tuple[Tensor, Tensor]:
    """That of this machine; see :func:`split_text`."""
    return split_text(source_files(source_roots()), training, held_out)


class Sources(Text):
    """Sequences of bytes of this machine's sources; every byte but the first is to be predicted.

    Args:
        seed: Decides where the sequences of a batch begin.
        batch: Sequences of all workers in a step.
        length: Bytes that are predicted in each.
        held_out: Sequences of the validation set, spread evenly over the files that are held out.
    """

    made_of = ("python", "torch")

    def __init__(self, seed: int, batch: int, length: int = 256, held_out: int = 2048) -> None:
        super().__init__(seed, batch, length, held_out)

    def texts(self) -> tuple[Tensor, Tensor]:
        return source_text()


class ShortSources(Sources):
    """Shorter sequences of the same, and fewer that are held out."""

    def __init__(self, seed: int, batch: int, length: int = 64, held_out: int = 512) -> None:
        super().__init__(seed, batch, length, held_out)
