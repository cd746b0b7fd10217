"""One rank's part of a checkpoint: written with a digest, and read with everything checked before it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor

#: Key of the entry in the main checkpoint.
ENTRY = "safusion"
#: Version of entry and parts. 1: parts in files that every checkpoint of a name shared, without digests.
FORMAT = 2
KNOWN_FORMATS = (1, FORMAT)
_BLOCK = 1 << 20


class UnusablePart(Exception):
    """A part cannot be used; the message says why."""


class _Digesting:
    """Passes bytes on to a file, with a digest of them; keeps the error that ended it, which torch does not."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        if self.error is None:
            self._file.flush()


def dump(part: Mapping[str, Any], file: IO[bytes]) -> str:
    """Writes a part.

    Args:
        part: Plain values and tensors.
        file: Open for writing.

    Returns:
        The digest of what was written.

    Raises:
        OSError: What the file raised.
    """
    out = _Digesting(file)
    torch.save(part, out)  # type: ignore[arg-type]  # it needs write and flush only
    if out.error is not None:
        raise out.error
    return out.digest.hexdigest()


def load(file: IO[bytes], digest: str | None, entry: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Reads a part and checks all of it, so that using it cannot fail.

    Args:
        file: Open for reading.
        digest: What :func:`dump` returned; None for parts of format 1.
        entry: Of the main checkpoint.
        rank: Whose part it has to be.

    Raises:
        UnusablePart: If it is damaged, or of another checkpoint or rank.
    """
    if digest is not None:
        found = hashlib.sha256()
        while block := file.read(_BLOCK):
            found.update(block)
        if found.hexdigest() != digest:
            raise UnusablePart("is damaged: its digest is not the one in the checkpoint")
        file.seek(0)
    try:
        part = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise UnusablePart(f"is damaged: {error!r:.200}") from None
    if not isinstance(part, dict) or part.get("nonce") != entry["nonce"]:
        raise UnusablePart("belongs to another checkpoint")
    for key, expected in (("format", entry["format"]), ("world_size", entry["world_size"]), ("rank", rank)):
        if part.get(key) != expected:
            raise UnusablePart(f"has {key} {part.get(key)!r:.50}, expected {expected!r}")
    problem = _problem(part)
    if problem:
        raise UnusablePart(f"is damaged: {problem}")
    return part


def _problem(part: Mapping[str, Any]) -> str | None:
    memory, unstepped = part.get("memory"), part.get("unstepped")
    if not isinstance(memory, dict) or not all(isinstance(tensors, dict) for tensors in memory.values()):
        return "'memory' is not a table of tensors by field and name"
    for field, name, tensor in _tensors(memory):
        if not isinstance(field, str) or not isinstance(name, str):
            return f"{field!r:.50}, {name!r:.50} are not the names of a field and a tensor"
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.layout != torch.strided:
            found = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            return f"{field} of {name} is {found}, not a dense tensor of float32"
    if not isinstance(unstepped, Sequence) or not all(isinstance(name, str) for name in unstepped):
        return "'unstepped' is not a list of names"
    if not isinstance(part.get("compressor"), dict):
        return "'compressor' is not a state by name"
    return None


def not_finite(memory: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Names of the tensors of which a field is not finite."""
    return list(dict.fromkeys(name for _, name, tensor in _tensors(memory) if not bool(tensor.isfinite().all())))


def _tensors(memory: Mapping[Any, Mapping[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    for field, tensors in memory.items():
        for name, tensor in tensors.items():
            yield field, name, tensor
