"""Saving: every rank's part first, then the entry for the main checkpoint."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from torch import Tensor

from lightning_safusion.__about__ import __version__
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.state import common_state, local_state
from lightning_safusion.integration.checkpoint import files
from lightning_safusion.integration.checkpoint.part import FORMAT, dump

# Bytes of each rank that all ranks hold at once while parts are sent to rank 0.
_PIECE = 2 << 20


def save(controller: Engine, settings: Mapping[str, str], path: _PATH, inside: bool = False) -> dict[str, Any]:
    """Writes this rank's part. Collective; all parts have been written when it returns on any rank.

    Parts of an earlier checkpoint at ``path`` stay: :func:`files.sweep` removes them once the new main checkpoint is in
    place.

    Args:
        controller: Between two windows.
        settings: The job's settings as text, equal on all ranks.
        path: Of the main checkpoint; that of rank 0 counts.
        inside: Put the parts into the entry of rank 0, in place of files beside ``path``.

    Returns:
        The entry for the main checkpoint: plain values, the same on all ranks but for parts that lie inside it.

    Raises:
        OSError: On all ranks, if any could not write its part; no rank's part stays.
    """
    space, transport = controller.space, controller.transport
    holds = any(bool(state.any()) for state in space.memory.state_dict().values())
    proposals = transport.gather_objects((uuid.uuid4().hex, "" if inside else files.side_folder(path), holds))
    nonce, folder, _ = proposals[0]
    entry = {
        "format": FORMAT,
        "package": __version__,
        "nonce": nonce,
        "world_size": transport.world_size,
        "holds_back": any(holding for _, _, holding in proposals),
        "settings": dict(settings),
        "engine": common_state(controller),
    }
    header = {key: entry[key] for key in ("format", "package", "nonce", "world_size")} | {"rank": transport.rank}
    payload = io.BytesIO()
    digest, problem = "", None
    try:
        part = header | local_state(controller)
        digest = dump(part, payload) if inside else files.write(part, folder, transport.rank, nonce)
    except Exception as error:
        problem = f"rank {transport.rank}: {reason(error)}"
    answers = transport.gather_objects((digest, problem, len(payload.getbuffer())))
    problems = [text for _, text, _ in answers if text]
    if problems:
        if not inside:
            files.discard(folder, transport.rank, nonce)
        where = f"to {folder}" if folder else f"of {path}"
        raise OSError(f"no residuals could be written {where}: {'; '.join(problems[:8])}")
    entry["digests"] = [digest for digest, _, _ in answers]
    if inside:
        parts = _gathered(payload.getbuffer(), [size for _, _, size in answers], transport)
        if parts:
            entry["parts"] = parts
    return entry


def reason(error: BaseException) -> str:
    """What an error says, with the file it names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return repr(error)


def _gathered(payload: memoryview, sizes: list[int], transport: Transport) -> list[Tensor]:
    """The bytes (uint8) of all ranks, on rank 0; in pieces, since a transport gathers to all ranks."""
    whole = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), _PIECE):
        pieces = transport.gather_objects(bytes(payload[start : start + _PIECE]))
        if transport.rank == 0:
            for received, piece in zip(whole, pieces, strict=True):
                received += piece
    return [torch.frombuffer(received, dtype=torch.uint8) for received in whole] if transport.rank == 0 else []
