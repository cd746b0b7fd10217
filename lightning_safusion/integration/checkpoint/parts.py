"""One rank's part of a checkpoint: a file beside the main checkpoint, or bytes inside it, checked before it is used.

The file is local, on a node's own disk, or remote (fsspec).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from time import time
from typing import IO, TYPE_CHECKING, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

#: Key of the entry in the main checkpoint.
ENTRY = "safusion"
#: Version of entry and parts. 1: parts in files that every checkpoint of a name shared, without digests.
FORMAT = 2
KNOWN_FORMATS = (1, FORMAT)

_SUFFIX = ".safusion"
_OURS = re.compile(r"rank_\d{5,}(-(?P<nonce>[0-9a-f]+))?\.pt(\.tmp)?")
# Seconds after which parts without a main checkpoint are those of a save that was killed, not of one under way.
_ORPHANED = 3600.0
_BLOCK = 1 << 20


class UnusablePart(Exception):
    """A part cannot be used; the message says why."""


class _Digesting:
    """Writes to a file and digests what is written; keeps the error of the file, which torch does not."""

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
    """Writes a part, of plain values and tensors, to an open file, and returns its digest.

    Raises:
        OSError: What the file raised.
    """
    out = _Digesting(file)
    torch.save(part, out)  # type: ignore[arg-type]  # it needs write and flush only
    if out.error is not None:
        raise out.error
    return out.digest.hexdigest()


def load(file: IO[bytes], digest: str | None, entry: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Reads a rank's part and checks all of it, so that using it cannot fail; parts of format 1 have no digest.

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


# Files


def side_folder(path: _PATH) -> str:
    """Folder of the parts of a main checkpoint that is written to ``path`` (local path or URL).

    A link in the place of the file itself is not followed: writing replaces it.
    """
    filesystem, name = url_to_fs(str(path))
    if not isinstance(filesystem, LocalFileSystem):
        return f"{path}{_SUFFIX}"
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name) + _SUFFIX)


def _file(folder: str, rank: int, nonce: str | None) -> str:
    return f"{folder}/rank_{rank:05d}.pt" if nonce is None else f"{folder}/rank_{rank:05d}-{nonce}.pt"


def write(part: Mapping[str, Any], folder: str, rank: int, nonce: str) -> str:
    """Writes a rank's part, all of it or nothing, and returns its digest.

    Raises:
        OSError: If it could not be written.
    """
    filesystem, name = url_to_fs(_file(folder, rank, nonce))
    filesystem.makedirs(os.path.dirname(name), exist_ok=True)
    if not isinstance(filesystem, LocalFileSystem):
        # object stores show an object when all of it has arrived
        payload = io.BytesIO()
        digest = dump(part, payload)
        filesystem.pipe_file(name, payload.getvalue())
        return digest
    temporary = f"{name}.tmp"
    try:
        with open(temporary, "wb") as file:
            digest = dump(part, file)
        os.replace(temporary, name)
    except BaseException as error:
        with suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = temporary  # writing to an open file does not name it
        raise
    return digest


def read(path: _PATH, rank: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Reads and checks a rank's part of the main checkpoint at ``path``.

    Raises:
        UnusablePart: If it is missing, damaged, or of another checkpoint.
    """
    if "parts" in entry:
        try:
            return load(io.BytesIO(entry["parts"][rank].numpy().tobytes()), entry["digests"][rank], entry, rank)
        except UnusablePart as error:
            raise UnusablePart(f"the part of rank {rank} in {path} {error}") from None
    first = entry["format"] == 1  # one name for all checkpoints, no digests
    problem = ""
    for folder in _folders(path):
        file_path = _file(folder, rank, None if first else entry["nonce"])
        try:
            filesystem, name = url_to_fs(file_path)
            with filesystem.open(name, "rb") as file:
                return load(file, None if first else entry["digests"][rank], entry, rank)
        except FileNotFoundError:
            problem = problem or f"{file_path} is missing"
        except UnusablePart as error:
            problem = problem or f"{file_path} {error}"
        except OSError as error:
            problem = problem or f"{file_path} cannot be read: {error!r:.200}"
    raise UnusablePart(problem)


def _folders(path: _PATH) -> list[str]:
    """Where the parts of an existing main checkpoint can be: beside the target of a link (``save_last="link"``), or
    beside the link, if a writer has written through it."""
    filesystem, name = url_to_fs(str(path))
    target = os.path.realpath(name) if isinstance(filesystem, LocalFileSystem) else path
    return list(dict.fromkeys([side_folder(target), side_folder(path)]))


def discard(folder: str, rank: int, nonce: str) -> None:
    """Removes one rank's part of a checkpoint that could not be saved; it need not be there."""
    filesystem, name = url_to_fs(_file(folder, rank, nonce))
    with suppress(OSError):
        filesystem.rm_file(name)
    with suppress(OSError):  # unless it has other parts
        filesystem.rmdir(os.path.dirname(name))


def sweep(path: _PATH, keep: str | None) -> None:
    """Removes parts that the main checkpoint at ``path`` does not need: of those it has replaced, and of saves that a
    kill has interrupted.

    Args:
        path: Of a main checkpoint that is in place.
        keep: Its nonce; None if it has no parts.
    """
    filesystem, folder = url_to_fs(side_folder(path))
    # What cannot be removed now is removed with the next checkpoint; ranks of several nodes may do this at once.
    with suppress(OSError):
        filesystem.invalidate_cache(folder)
        for file in filesystem.ls(folder, detail=False):
            known = _OURS.fullmatch(os.path.basename(str(file)))
            if known and (keep is None or known["nonce"] != keep or str(file).endswith(".tmp")):
                with suppress(OSError):
                    filesystem.rm_file(file)
        filesystem.rmdir(folder)  # unless it has other parts


def sweep_orphans(path: _PATH) -> None:
    """Removes folders of parts beside ``path`` whose main checkpoint does not exist: a kill came before it was written.

    Only local folders that nothing was written to for an hour. Call it where main checkpoints are written (rank 0): on
    another node with a disk of its own no main checkpoint exists.
    """
    filesystem, name = url_to_fs(str(path))
    if not isinstance(filesystem, LocalFileSystem):
        return
    with suppress(OSError):
        for folder in os.scandir(os.path.dirname(name)):
            if not folder.name.endswith(_SUFFIX) or os.path.lexists(folder.path.removesuffix(_SUFFIX)):
                continue
            files = list(os.scandir(folder.path))
            times = [file.stat().st_mtime for file in files]
            if all(_OURS.fullmatch(file.name) for file in files) and max(times, default=0.0) < time() - _ORPHANED:
                remove(folder.path.removesuffix(_SUFFIX))


def remove(path: _PATH) -> None:
    """Removes all parts of the main checkpoint that is, or was, at ``path``; there need not be any."""
    filesystem, folder = url_to_fs(side_folder(path))
    with suppress(FileNotFoundError):
        if filesystem.exists(folder):
            filesystem.rm(folder, recursive=True)


def fingerprint(path: _PATH) -> str | None:
    """Differs once the file at ``path`` has been written anew; None if there is none."""
    filesystem, name = url_to_fs(str(path))
    try:
        filesystem.invalidate_cache(os.path.dirname(name))
        return str(filesystem.ukey(name))
    except OSError:
        return None
