"""Saves the engine with the checkpoints of Lightning: first every rank's part, then the main checkpoint."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_safusion.__about__ import __version__
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.state import common_state, local_state
from lightning_safusion.integration.checkpoint import parts
from lightning_safusion.integration.checkpoint.restoring import restore

# Bytes of each rank that all ranks hold at once while parts are sent to rank 0.
_PIECE = 2 << 20
_SHOWN = 8

_T = TypeVar("_T")


class Checkpoints:
    """Saves and restores the engine with the checkpoints of Lightning.

    The parts of a checkpoint that is replaced are removed once the new main file is in place, never before: with an
    asynchronous plugin at the next save to that path, or at the end.

    Attributes:
        resumed: Path of the checkpoint that is being restored, and the engine's entry in it.
    """

    def __init__(self) -> None:
        self.resumed: tuple[_PATH, dict[str, Any]] | None = None
        # Main files that a thread of rank 0 may still be writing: the nonce of their parts, and (on rank 0) the
        # fingerprint of the file that they replace.
        self._under_way: dict[str, tuple[str | None, str | None]] = {}

    def save(
        self,
        engine: Engine | None,
        settings: Mapping[str, str],
        checkpoint: dict[str, Any],
        path: _PATH,
        plugin: CheckpointIO,
        ranks: tuple[int, int],
        write: Callable[[], None],
    ) -> None:
        """Saves a checkpoint; collective with an engine.

        Args:
            engine: Of this rank; None with plain DDP.
            settings: Its settings as text.
            checkpoint: What Lightning saves; the engine's entry is added.
            path: Where.
            plugin: Writes it.
            ranks: This process's global and local rank.
            write: Has the checkpoint written.

        Raises:
            OSError: On all ranks, if a part or the main checkpoint could not be written. A checkpoint that was to be
                replaced keeps its parts.
        """
        rank, local_rank = ranks
        beside = has_files(plugin)
        asynchronous = type(plugin) is AsyncCheckpointIO and beside
        saved = engine if "optimizer_states" in checkpoint else None  # a checkpoint of weights has no parts
        if saved is not None:
            self._end_earlier(plugin, path, saved.transport)
        before = None
        if rank == 0 and asynchronous:
            self._wait(plugin, path)
            before = parts.fingerprint(path)
        nonce, sweeps = None, rank == 0
        if saved is not None:
            # first the parts, so that no main checkpoint is ever there before them
            entry = checkpoint[parts.ENTRY] = save(saved, settings, path, inside=not beside)
            nonce, sweeps = entry["nonce"], local_rank == 0  # on every node: their folders need not be one
            failed = f"{path} could not be saved"
            _on_all_ranks(write, saved.transport, failed, partial(_discard, plugin, path, rank, entry["nonce"]))
        else:
            _named(write, path)
        if asynchronous:
            self._under_way[str(path)] = nonce, before
        elif beside and sweeps:
            parts.sweep(path, nonce)
        if beside and rank == 0:
            parts.sweep_orphans(path)

    def _end_earlier(self, plugin: CheckpointIO, path: _PATH, transport: Transport) -> None:
        """Removes what an earlier asynchronous save to ``path`` has replaced; raises on all ranks if that failed."""
        if str(path) in self._under_way:
            wait = partial(self._wait, plugin, path) if transport.rank == 0 else lambda: None
            _on_all_ranks(wait, transport, f"{path} could not be saved")
            nonce, _ = self._under_way.pop(str(path))
            parts.sweep(path, nonce)

    def _wait(self, plugin: CheckpointIO, path: _PATH) -> None:
        """Waits until an earlier save to ``path`` is in place."""
        earlier = self._under_way.get(str(path))
        if earlier is not None and parts.fingerprint(path) == earlier[1]:
            plugin.teardown()  # waits for all that was handed over; the plugin can be used again

    def loaded(self, checkpoint: Mapping[str, Any], path: _PATH) -> None:
        """A checkpoint has been loaded; the engine is restored when it exists."""
        entry = checkpoint.get(parts.ENTRY)
        self.resumed = (path, entry) if isinstance(entry, dict) else None

    @property
    def entry(self) -> dict[str, Any]:
        """The engine's entry in the checkpoint that is being restored; empty if there is none."""
        return self.resumed[1] if self.resumed is not None else {}

    def restore(self, engine: Engine | None, settings: Mapping[str, str]) -> None:
        """Restores the engine from the loaded checkpoint, if there is one of each. Collective."""
        resumed, self.resumed = self.resumed, None
        if resumed is None or engine is None:
            return
        path, entry = resumed
        notes = restore(engine, settings, entry, path)
        if notes:
            rank_zero_warn(f"SAFusionStrategy resumes from {path} with differences: {'; '.join(notes)}.")
        saved_by, workers = entry.get("world_size"), engine.transport.world_size
        if saved_by != workers:
            plural = "" if saved_by == 1 else "s"
            rank_zero_info(
                f"SAFusionStrategy: {path} was saved by {saved_by} worker{plural} and is resumed by {workers}: each "
                f"takes the mean of the residuals that can be used, and the plan is made anew."
            )

    def removed(self, plugin: CheckpointIO, path: _PATH, local_rank: int) -> None:
        """A checkpoint has been removed."""
        self._under_way.pop(str(path), None)
        if local_rank == 0 and has_files(plugin):
            parts.remove(path)

    def finished(self, rank: int) -> None:
        """All asynchronous writing has ended."""
        for path, (nonce, _) in self._under_way.items():
            if rank == 0:
                parts.sweep(path, nonce)
        self._under_way.clear()


def has_files(plugin: CheckpointIO) -> bool:
    """Whether main checkpoints are files that Lightning itself writes, so that parts can lie beside them."""
    return type(plugin.checkpoint_io if type(plugin) is AsyncCheckpointIO else plugin) is TorchCheckpointIO


def save(engine: Engine, settings: Mapping[str, str], path: _PATH, inside: bool = False) -> dict[str, Any]:
    """Writes this rank's part. Collective; all parts have been written when it returns on any rank.

    Parts of an earlier checkpoint at ``path`` stay: :func:`parts.sweep` removes them once the new main checkpoint is in
    place.

    Args:
        engine: Between two windows.
        settings: The job's settings as text, equal on all ranks.
        path: Of the main checkpoint; that of rank 0 counts.
        inside: Put the parts into the entry of rank 0, in place of files beside ``path``.

    Returns:
        The entry for the main checkpoint: plain values, the same on all ranks but for parts that lie inside it.

    Raises:
        OSError: On all ranks, if any could not write its part; no rank's part stays.
    """
    space, transport = engine.space, engine.transport
    folder = "" if inside else parts.side_folder(path)
    proposals = transport.gather_objects((uuid.uuid4().hex, folder, space.memory.holds))
    nonce, folder, _ = proposals[0]
    header = {"format": parts.FORMAT, "package": __version__, "nonce": nonce, "world_size": transport.world_size}
    entry = header | {
        "holds_back": any(holding for _, _, holding in proposals),
        "settings": dict(settings),
        "engine": common_state(engine),
    }
    payload = io.BytesIO()

    def write() -> tuple[str, int]:
        part = header | {"rank": transport.rank} | local_state(engine)
        digest = parts.dump(part, payload) if inside else parts.write(part, folder, transport.rank, nonce)
        return digest, len(payload.getbuffer())

    failed = f"no residuals could be written {f'to {folder}' if folder else f'of {path}'}"
    undo = None if inside else partial(parts.discard, folder, transport.rank, nonce)
    written = _on_all_ranks(write, transport, failed, undo)
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


def _discard(plugin: CheckpointIO, path: _PATH, rank: int, nonce: str) -> None:
    """Removes this rank's part of a main checkpoint that could not be written, where it certainly was not.

    An asynchronous plugin may raise the error of an earlier save, and object stores an error after the object has
    arrived: those parts stay until the next save to ``path``.
    """
    if type(plugin) is TorchCheckpointIO and isinstance(url_to_fs(str(path))[0], LocalFileSystem):
        parts.discard(parts.side_folder(path), rank, nonce)


def _on_all_ranks(
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


def _named(write: Callable[[], None], path: _PATH) -> None:
    """Writes; an error that names no file names ``path``."""
    try:
        write()
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _reason(error: BaseException) -> str:
    """What an error says, with the file it names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return repr(error)
