"""Parts in files beside a main checkpoint that is a file: local, on a node's own disk, or remote (fsspec)."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.types import _PATH

from lightning_safusion.integration.checkpoint.part import UnusablePart, dump, load

_SUFFIX = ".safusion"
_OURS = re.compile(r"rank_\d{5,}(-(?P<nonce>[0-9a-f]+))?\.pt(\.tmp)?")


def side_folder(path: _PATH) -> str:
    """Folder of the parts of a main checkpoint that is written to ``path`` (local path or URL).

    A link in the place of the file itself is not followed: writing replaces it.
    """
    filesystem, name = url_to_fs(str(path))
    if not isinstance(filesystem, LocalFileSystem):
        return f"{path}{_SUFFIX}"
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name) + _SUFFIX)


def write(part: Mapping[str, Any], folder: str, rank: int, nonce: str) -> str:
    """Writes a rank's part; it is there as a whole or not at all.

    Returns:
        Its digest.

    Raises:
        OSError: If it could not be written; nothing of it stays.
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


def discard(folder: str, rank: int, nonce: str) -> None:
    """Removes one rank's part of a checkpoint that could not be saved; it need not be there."""
    filesystem, name = url_to_fs(_file(folder, rank, nonce))
    with suppress(OSError):
        filesystem.rm_file(name)
    _remove_if_empty(folder)


def sweep(path: _PATH, keep: str | None) -> None:
    """Removes parts that the main checkpoint at ``path`` does not need: of those it has replaced, and of saves that a
    kill has interrupted.

    Args:
        path: Of a main checkpoint that is in place.
        keep: Its nonce; None if it has no parts.
    """
    folder = side_folder(path)
    filesystem, name = url_to_fs(folder)
    # What cannot be removed now is removed with the next checkpoint; ranks of several nodes may do this at once.
    with suppress(OSError):
        filesystem.invalidate_cache(name)
        for file in filesystem.ls(name, detail=False):
            known = _OURS.fullmatch(os.path.basename(str(file)))
            if known and (keep is None or known["nonce"] != keep or str(file).endswith(".tmp")):
                with suppress(OSError):
                    filesystem.rm_file(file)
        _remove_if_empty(folder)


def remove(path: _PATH) -> None:
    """Removes all parts of the main checkpoint that is, or was, at ``path``; there need not be any."""
    filesystem, name = url_to_fs(side_folder(path))
    with suppress(FileNotFoundError):
        if filesystem.exists(name):
            filesystem.rm(name, recursive=True)


def fingerprint(path: _PATH) -> str | None:
    """Differs once the file at ``path`` has been written anew; None if there is none."""
    filesystem, name = url_to_fs(str(path))
    try:
        filesystem.invalidate_cache(os.path.dirname(name))
        return str(filesystem.ukey(name))
    except OSError:
        return None


def _folders(path: _PATH) -> list[str]:
    """Where the parts of an existing main checkpoint can be: beside what a link points to (``save_last="link"``), or
    beside the name, if a writer has written through the link."""
    filesystem, name = url_to_fs(str(path))
    target = os.path.realpath(name) if isinstance(filesystem, LocalFileSystem) else path
    return list(dict.fromkeys([side_folder(target), side_folder(path)]))


def _file(folder: str, rank: int, nonce: str | None) -> str:
    return f"{folder}/rank_{rank:05d}.pt" if nonce is None else f"{folder}/rank_{rank:05d}-{nonce}.pt"


def _remove_if_empty(folder: str) -> None:
    filesystem, name = url_to_fs(folder)
    with suppress(OSError):
        filesystem.rmdir(name)
