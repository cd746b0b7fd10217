"""Saves the engine with the checkpoints of Lightning: first every rank's part, then the main checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.integration.checkpoint import parts
from lightning_safusion.integration.checkpoint.restoring import restore
from lightning_safusion.integration.checkpoint.saving import on_all_ranks, save

if TYPE_CHECKING:
    from lightning_safusion.strategy import SAFusionStrategy


class Checkpoints:
    """Saves and restores the engine with the checkpoints of Lightning.

    The parts of a checkpoint that is replaced are removed once the new main file is in place, never before: with an
    asynchronous plugin at the next save to that path, or at the end.

    Args:
        strategy: Has the engine, and the plugin that reads and writes checkpoints.

    Attributes:
        resumed: Path of the checkpoint that is being restored, and the engine's entry in it.
    """

    def __init__(self, strategy: SAFusionStrategy) -> None:
        self._strategy = strategy
        self.resumed: tuple[_PATH, dict[str, Any]] | None = None
        # Main files that a thread of rank 0 may still be writing: the nonce of their parts, and (on rank 0) the
        # fingerprint of the file that they replace.
        self._under_way: dict[str, tuple[str | None, str | None]] = {}

    def save(self, engine: Engine | None, checkpoint: dict[str, Any], path: _PATH, write: Callable[[], None]) -> None:
        """Saves a checkpoint, to which the engine's entry is added; collective with an engine.

        ``write`` has the plugin write it.

        Raises:
            OSError: On all ranks, if a part or the main checkpoint could not be written. A checkpoint that was to be
                replaced keeps its parts.
        """
        plugin, rank = self._strategy.checkpoint_io, self._strategy.global_rank
        beside = has_files(plugin)
        asynchronous = type(plugin) is AsyncCheckpointIO and beside
        saved = engine if "optimizer_states" in checkpoint else None  # a checkpoint of weights has no parts
        if saved is not None:
            self._end_earlier(path, saved.transport)
        before = None
        if rank == 0 and asynchronous:
            self._wait(path)
            before = parts.fingerprint(path)
        nonce, sweeps = None, rank == 0
        if saved is not None:
            # first the parts, so that no main checkpoint is ever there before them
            entry = checkpoint[parts.ENTRY] = save(saved, self._strategy.describe(), path, inside=not beside)
            nonce = entry["nonce"]
            sweeps = self._strategy.local_rank == 0  # on every node: their folders need not be one
            failed = f"{path} could not be saved"
            on_all_ranks(write, saved.transport, failed, partial(_discard, plugin, path, rank, entry["nonce"]))
        else:
            _named(write, path)
        if asynchronous:
            self._under_way[str(path)] = nonce, before
        elif beside and sweeps:
            parts.sweep(path, nonce)
        if beside and rank == 0:
            parts.sweep_orphans(path)

    def _end_earlier(self, path: _PATH, transport: Transport) -> None:
        """Removes what an earlier asynchronous save to ``path`` has replaced; raises on all ranks if that failed."""
        if str(path) in self._under_way:
            wait = partial(self._wait, path) if transport.rank == 0 else lambda: None
            on_all_ranks(wait, transport, f"{path} could not be saved")
            nonce, _ = self._under_way.pop(str(path))
            parts.sweep(path, nonce)

    def _wait(self, path: _PATH) -> None:
        """Waits until an earlier save to ``path`` is in place."""
        earlier = self._under_way.get(str(path))
        if earlier is not None and parts.fingerprint(path) == earlier[1]:
            self._strategy.checkpoint_io.teardown()  # waits for all that was handed over; the plugin can be used again

    def loaded(self, checkpoint: Mapping[str, Any], path: _PATH) -> None:
        """A checkpoint has been loaded; the engine is restored when it exists."""
        entry = checkpoint.get(parts.ENTRY)
        self.resumed = (path, entry) if isinstance(entry, dict) else None
        if entry and self.resumed is None:
            rank_zero_warn(
                f"SAFusion: {path} has no residuals of models that are not sharded, or of several: every worker begins "
                "with empty ones. With one sharded model save_distributed_checkpoint=False writes a file that has them."
            )

    @property
    def entry(self) -> dict[str, Any]:
        """The engine's entry in the checkpoint that is being restored; empty if there is none."""
        return self.resumed[1] if self.resumed is not None else {}

    def restore(self) -> None:
        """Restores the engine from the loaded checkpoint, if there is one of each. Collective."""
        resumed, self.resumed = self.resumed, None
        engine = self._strategy.engine
        if resumed is None or engine is None:
            return
        path, entry = resumed
        notes = restore(engine, self._strategy.describe(), entry, path)
        if notes:
            rank_zero_warn(f"SAFusionStrategy resumes from {path} with differences: {'; '.join(notes)}.")
        saved_by, workers = entry.get("world_size"), engine.transport.world_size
        if saved_by != workers:
            plural = "" if saved_by == 1 else "s"
            rank_zero_info(
                f"SAFusion: {path} was saved by {saved_by} worker{plural} and is resumed by {workers}: each "
                f"takes the mean of the residuals that can be used, and the plan is made anew."
            )

    def removed(self, path: _PATH) -> None:
        """A checkpoint has been removed."""
        self._under_way.pop(str(path), None)
        if self._strategy.local_rank == 0 and has_files(self._strategy.checkpoint_io):
            parts.remove(path)

    def finished(self) -> None:
        """All asynchronous writing has ended."""
        for path, (nonce, _) in self._under_way.items():
            if self._strategy.global_rank == 0:
                parts.sweep(path, nonce)
        self._under_way.clear()


def has_files(plugin: CheckpointIO) -> bool:
    """Whether main checkpoints are files that Lightning itself writes, so that parts can lie beside them."""
    return type(plugin.checkpoint_io if type(plugin) is AsyncCheckpointIO else plugin) is TorchCheckpointIO


def _discard(plugin: CheckpointIO, path: _PATH, rank: int, nonce: str) -> None:
    """Removes this rank's part of a main checkpoint that could not be written, where it certainly was not.

    An asynchronous plugin may raise the error of an earlier save, and object stores an error after the object has
    arrived: those parts stay until the next save to ``path``.
    """
    if type(plugin) is TorchCheckpointIO and isinstance(url_to_fs(str(path))[0], LocalFileSystem):
        parts.discard(parts.side_folder(path), rank, nonce)


def _named(write: Callable[[], None], path: _PATH) -> None:
    """Writes; an error that names no file names ``path``."""
    try:
        write()
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
