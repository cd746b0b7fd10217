"""Saves the engine: every rank's part is written, or sent to rank 0, before there is an entry that names them."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_safusion.__about__ import __version__
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.state import common_state, local_state
from lightning_safusion.integration.checkpoint import parts

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

# Bytes of each rank that all ranks hold at once while parts are sent to rank 0.
_PIECE = 2 << 20
_SHOWN = 8

_T = TypeVar("_T")


def header(nonce: str, world_size: int) -> dict[str, Any]:
    """What an entry and its parts have in common."""
    return {"format": parts.FORMAT, "package": __version__, "nonce": nonce, "world_size": world_size}


def save(
    engine: Engine,
    settings: Mapping[str, str],
    path: _PATH,
    inside: bool = False,
    memory: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Writes this rank's part. Collective; all parts have been written when it returns on any rank.

    Parts of an earlier checkpoint at ``path`` stay: :func:`parts.sweep` removes them once the new main checkpoint is in
    place.

    Args:
        engine: Between two windows.
        settings: The job's settings as text, equal on all ranks.
        path: Of the main checkpoint; that of rank 0 counts.
        inside: Put the parts into the entry of rank 0, in place of files beside ``path``.
        memory: Residuals in place of those of the engine, which are pieces.

    Returns:
        The entry for the main checkpoint: plain values, the same on all ranks but for parts that lie inside it.

    Raises:
        OSError: On all ranks, if any could not write its part; no rank's part stays.
    """
    space, transport = engine.space, engine.transport
    folder = "" if inside else parts.side_folder(path)
    proposals = transport.gather_objects((uuid.uuid4().hex, folder, space.memory.holds))
    nonce, folder, _ = proposals[0]
    common = header(nonce, transport.world_size)
    entry = common | {
        "holds_back": any(holding for _, _, holding in proposals),
        "settings": dict(settings),
        "engine": common_state(engine),
    }
    payload = io.BytesIO()

    def write() -> tuple[str, int]:
        part = common | {"rank": transport.rank} | local_state(engine) | ({} if memory is None else {"memory": memory})
        digest = parts.dump(part, payload) if inside else parts.write(part, folder, transport.rank, nonce)
        return digest, len(payload.getbuffer())

    failed = f"no residuals could be written {f'to {folder}' if folder else f'of {path}'}"
    undo = None if inside else partial(parts.discard, folder, transport.rank, nonce)
    written = on_all_ranks(write, transport, failed, undo)
    entry["digests"] = [digest for digest, _ in written]
    if inside:
        pieces = _gathered(payload.getbuffer(), [size for _, size in written], transport)
        if pieces:
            entry["parts"] = pieces
    return entry


def _gathered(payload: memoryview, sizes: list[int], transport: Transport) -> list[Tensor]:
    """The bytes (uint8) of all ranks, on rank 0; in pieces, since a transport gathers to all ranks."""
    received = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), _PIECE):
        pieces = transport.gather_objects(bytes(payload[start : start + _PIECE]))
        if transport.rank == 0:
            for buffer, piece in zip(received, pieces, strict=True):
                buffer += piece
    return [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received] if transport.rank == 0 else []


def on_all_ranks(
    action: Callable[[], _T], transport: Transport, failed: str, undo: Callable[[], None] | None = None
) -> list[_T]:
    """Calls a function on every rank, and returns the results of all. Collective; if any failed, all raise an OSError.

    ``undo`` is called on all ranks if any failed. Not where a rank has died: its file may be in place.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    everyone = transport.gather_objects((result, None if failure is None else _reason(failure)))
    problems = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(everyone) if reason is not None]
    if problems:
        if undo is not None:
            undo()
        raise OSError(f"{failed}: {'; '.join(problems[:_SHOWN])}") from failure
    return [theirs for theirs, _ in everyone]


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return repr(error)
