"""The checkpoints of a strategy: the engine's entry and parts beside what Lightning saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_safusion.fusion.engine import Engine
from lightning_safusion.integration.checkpoint.part import ENTRY
from lightning_safusion.integration.checkpoint.replacing import Replacing, discard, has_files, raise_together
from lightning_safusion.integration.checkpoint.restoring import restore
from lightning_safusion.integration.checkpoint.saving import save

Save = Callable[[], None]


class Checkpoints:
    """Saves and restores the engine with the checkpoints of Lightning.

    Attributes:
        resumed: The checkpoint that is being restored, and our entry in it.
    """

    def __init__(self) -> None:
        self.resumed: tuple[_PATH, dict[str, Any]] | None = None
        self._replacing = Replacing()

    def save(
        self,
        engine: Engine | None,
        settings: Mapping[str, str],
        checkpoint: dict[str, Any],
        path: _PATH,
        plugin: CheckpointIO,
        ranks: tuple[int, int],
        write: Save,
    ) -> None:
        """Saves a checkpoint; collective with an engine.

        Args:
            engine: Of this rank; None with plain DDP.
            settings: Its settings as text.
            checkpoint: What Lightning saves; our entry is added.
            path: Where.
            plugin: Writes it.
            ranks: This process's global and local rank.
            write: Has the checkpoint written.

        Raises:
            OSError: On all ranks, if a part or the main checkpoint could not be written. A checkpoint that was to be
                replaced keeps its parts.
        """
        rank, local_rank = ranks
        if engine is None or "optimizer_states" not in checkpoint:
            before = self._replacing.before(plugin, path, rank)
            write()
            self._replacing.after(plugin, path, None, before, sweeps=rank == 0)
            return
        self._replacing.settle(plugin, path, engine.transport)
        before = self._replacing.before(plugin, path, rank)
        # First the parts, so that no main checkpoint is ever there before them
        entry = save(engine, settings, path, inside=not has_files(plugin))
        checkpoint[ENTRY] = entry
        failure = None
        try:
            write()
        except Exception as error:
            failure = error
        undo = partial(discard, plugin, path, rank, entry["nonce"])
        raise_together(engine.transport, failure, path, undo)
        # on every node: their folders need not be one
        self._replacing.after(plugin, path, entry["nonce"], before, sweeps=local_rank == 0)

    def loaded(self, checkpoint: Mapping[str, Any], path: _PATH) -> None:
        """A checkpoint has been loaded; the engine is restored when it exists."""
        entry = checkpoint.get(ENTRY)
        self.resumed = (path, entry) if isinstance(entry, dict) else None

    @property
    def entry(self) -> dict[str, Any]:
        """Our entry in the checkpoint that is being restored; empty if there is none."""
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
        self._replacing.removed(plugin, path, sweeps=local_rank == 0)

    def finished(self, rank: int) -> None:
        """All asynchronous writing has ended."""
        self._replacing.finished(sweeps=rank == 0)
