"""Checkpoints: a small entry in the main file, and beside it a folder with one file per rank.

Residuals differ between ranks and are as large as the model, so they do not belong into the file that rank 0 writes:
``last.ckpt`` gets a neighbour ``last.ckpt.safusion/rank_00000.pt`` and so on. A number drawn anew for every checkpoint
joins the files: after a crash between two of them, or a copy that left some behind, they do not match, which counts as
missing. Everything is plain values and tensors, so that any program can open it with ``weights_only=True``.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_safusion.__about__ import __version__
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.state import (
    HeldBack,
    common_state,
    local_state,
    restore_common,
    restore_sparsifier,
    restore_unstepped,
)

#: Key of the entry in the main checkpoint.
ENTRY = "safusion"
_FORMAT = 1
_SUFFIX = ".safusion"
# Settings that neither plan nor measured costs depend on, or whose change the engine finds by itself.
_NOT_PLANNED_WITH = ("memory", "density")


class _Unreadable(Exception):
    """A side file cannot be used; the message says which and why."""


def side_folder(path: str | os.PathLike[str]) -> str:
    """Folder of the side files of a main checkpoint that is written to ``path`` (local path or URL).

    A link in the place of the file itself is not followed: writing replaces it.
    """
    filesystem, name = url_to_fs(str(path))
    if not isinstance(filesystem, LocalFileSystem):
        return f"{path}{_SUFFIX}"
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name) + _SUFFIX)


def _folders(path: str | os.PathLike[str]) -> list[str]:
    """Where the side files of an existing main checkpoint can be: beside what a link points to (``save_last="link"``),
    or beside the name, if a writer has written through the link."""
    filesystem, name = url_to_fs(str(path))
    target = os.path.realpath(name) if isinstance(filesystem, LocalFileSystem) else path
    return list(dict.fromkeys([side_folder(target), side_folder(path)]))


def save(controller: Engine, settings: Mapping[str, str], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes this rank's side file. Collective; it has been written on all ranks when it returns on any.

    Args:
        controller: Between two windows.
        settings: The job's settings as text, equal on all ranks.
        path: Of the main checkpoint; that of rank 0 counts.

    Returns:
        The entry for the main checkpoint: plain values, the same on all ranks.

    Raises:
        OSError: On all ranks, if any could not write its file.
    """
    space, transport = controller.space, controller.transport
    holds = any(bool(state.any()) for state in space.memory.state_dict().values())
    proposals = transport.gather_objects((uuid.uuid4().hex, side_folder(path), holds))
    nonce, folder, _ = proposals[0]
    entry = {
        "format": _FORMAT,
        "package": __version__,
        "nonce": nonce,
        "world_size": transport.world_size,
        "holds_back": any(holding for _, _, holding in proposals),
        "settings": dict(settings),
        "engine": common_state(controller),
    }
    header = {key: entry[key] for key in ("format", "package", "nonce", "world_size")} | {"rank": transport.rank}
    problem = None
    try:
        _write(header | local_state(controller), _file(folder, transport.rank))
    except Exception as error:
        problem = f"rank {transport.rank}: {error!r}"
    problems = [text for text in transport.gather_objects(problem) if text]
    if problems:
        raise OSError(f"no side files could be written to {folder}: {'; '.join(problems[:8])}")
    return entry


def restore(
    controller: Engine, settings: Mapping[str, str], entry: Mapping[str, Any], path: str | os.PathLike[str]
) -> list[str]:
    """Restores what :func:`save` saved. Collective; every rank decides the same.

    On as many workers as saved it, each takes its own part. On another number each takes the mean of all parts, so
    that what all workers together have held back, 1/P of the sum over P workers, stays what it was.

    Args:
        controller: Between two windows.
        settings: The job's settings as text, equal on all ranks.
        entry: Of the main checkpoint.
        path: Of the main checkpoint.

    Returns:
        What could not be restored and why, in sentences; empty if all went well.
    """
    if entry.get("format") != _FORMAT:
        return [f"{path} has a format (version {entry.get('format')}) that this version does not know"]
    world_size = controller.transport.world_size
    planned = {key: text for key, text in settings.items() if key not in _NOT_PLANNED_WITH}
    same_job = entry["world_size"] == world_size and planned.items() <= entry["settings"].items()
    restore_common(controller, entry["engine"], same_job)
    notes = _changes(entry["settings"], settings)
    part, differences, problems = _restore_memory(controller, entry, path)
    if problems:
        return [
            *notes,
            f"its side files cannot be used ({'; '.join(problems[:4])}), so that every worker begins with nothing "
            f"held back: the gradients of some steps will seem a little smaller",
        ]
    if differences:
        shown = ", ".join(differences[:8]) + (f" and {len(differences) - 8} more" if len(differences) > 8 else "")
        notes.append(f"what it holds back differs from what this job can take in: {shown}; these begin with nothing")
    if part is not None:
        restore_unstepped(controller, part["unstepped"])
        if settings["compressor"] == entry["settings"]["compressor"]:
            try:
                restore_sparsifier(controller, part["compressor"])
            except ValueError as error:
                notes.append(f"the compressor begins anew: {error}")
    return notes


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    notes = []
    if now["compressor"] != before["compressor"]:
        notes.append(f"the compressor was {before['compressor']} and is {now['compressor']}, which begins anew")
    was, is_now = (text["memory"].partition("(")[0] for text in (before, now))
    if is_now != was:  # its options may change: what it holds keeps its meaning
        notes.append(f"the memory was {was} and is {is_now}, which takes in only what both of them have")
    return notes


def _restore_memory(
    controller: Engine, entry: Mapping[str, Any], path: str | os.PathLike[str]
) -> tuple[dict[str, Any] | None, list[str], list[str]]:
    """Returns this rank's own part (None on another number of workers), tensors left out, and problems of any rank."""
    transport, saved_by = controller.transport, int(entry["world_size"])
    own = saved_by == transport.world_size
    held = HeldBack(controller)
    part, differences, problem = None, [], None
    # on another number of workers the ranks share the reading
    for rank in [transport.rank] if own else range(transport.rank, saved_by, transport.world_size):
        try:
            part = _read(_folders(path), rank, entry["nonce"])
        except _Unreadable as error:
            problem = str(error)
            break
        held.add(part["memory"], 1.0 if own else 1.0 / saved_by)
        differences = held.mismatches(part["memory"])
    found = transport.gather_objects((problem, entry["nonce"]))
    problems = [text for text, _ in found if text]
    if len({nonce for _, nonce in found}) > 1:
        problems.append("the workers have loaded different checkpoints")
    if problems:
        held = HeldBack(controller)
    elif not own:
        for flat in held.fields.values():
            transport.all_reduce(flat).wait()
    held.restore()
    return part if own else None, differences, problems


def remove(path: str | os.PathLike[str]) -> None:
    """Removes the side files of the main checkpoint that is, or was, at ``path``; there need not be any."""
    folder = side_folder(path)
    filesystem, name = url_to_fs(folder)
    with suppress(FileNotFoundError):
        if filesystem.exists(name):
            filesystem.rm(name, recursive=True)


def _file(folder: str, rank: int) -> str:
    return f"{folder}/rank_{rank:05d}.pt"


def _write(state: dict[str, Any], path: str) -> None:
    """Writes to another name in the same folder first, so that the file is there as a whole or not at all."""
    filesystem, name = url_to_fs(path)
    filesystem.makedirs(os.path.dirname(name), exist_ok=True)
    if isinstance(filesystem, LocalFileSystem):
        torch.save(state, f"{name}.tmp")
        os.replace(f"{name}.tmp", name)
        return
    # object stores show an object when all of it has arrived
    payload = io.BytesIO()
    torch.save(state, payload)
    filesystem.pipe_file(name, payload.getvalue())


def _read(folders: list[str], rank: int, nonce: str) -> dict[str, Any]:
    problem = ""
    for folder in folders:
        path = _file(folder, rank)
        try:
            filesystem, name = url_to_fs(path)
            with filesystem.open(name, "rb") as file:
                state = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            problem = problem or f"{path} is missing"
        except Exception as error:  # a damaged file can raise anything
            problem = problem or f"{path} is damaged: {error!r:.200}"
        else:
            if isinstance(state, dict) and state.get("nonce") == nonce:
                return state
            problem = problem or f"{path} belongs to another checkpoint"
    raise _Unreadable(problem)
