"""The part of the strategy that deals with checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_safusion.checkpoint import ENTRY, restore, save
from lightning_safusion.checkpoint.replacing import Replacing, discard, has_files, raise_together
from lightning_safusion.fusion.controller import Controller
from lightning_safusion.fusion.engine import EngineSettings


class ResumableDDPStrategy(DDPStrategy):
    """DDP with checkpoints that hold an engine's state as well: an entry, and the parts of all ranks."""

    settings: EngineSettings
    _controller: Controller | None = None  # runs the gradients; None with plain DDP
    _ended: Controller | None = None  # of a fit that has ended: it may still be saved
    _resumed: tuple[_PATH, dict[str, Any]] | None = None  # checkpoint being restored, our entry in it

    @cached_property
    def _replacing(self) -> Replacing:
        return Replacing()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Writes one part per rank as well, unless the checkpoint holds weights only; all ranks call it.

        Raises:
            OSError: On all ranks, if a part or the main checkpoint could not be written. A checkpoint that was to be
                replaced keeps its parts.
        """
        controller = self._controller
        if controller is None and torch.distributed.is_initialized():
            controller = self._ended
        plugin, rank = self.checkpoint_io, self.global_rank
        if controller is None or "optimizer_states" not in checkpoint:
            before = self._replacing.before(plugin, filepath, rank)
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self._replacing.after(plugin, filepath, None, before, sweeps=self.is_global_zero)
            return
        self._replacing.settle(plugin, filepath, controller.transport)
        before = self._replacing.before(plugin, filepath, rank)
        # First the parts, so that no main checkpoint is ever there before them
        entry = save(controller, self.settings.describe(), filepath, inside=not has_files(plugin))
        checkpoint[ENTRY] = entry
        failure = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except Exception as error:
            failure = error
        undo = partial(discard, plugin, filepath, rank, entry["nonce"])
        raise_together(controller.transport, failure, filepath, undo)
        # on every node: their folders need not be one
        self._replacing.after(plugin, filepath, entry["nonce"], before, sweeps=self.local_rank == 0)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        # Lightning before 2.6 does not know weights_only
        options = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = super().load_checkpoint(checkpoint_path, **options)
        entry = checkpoint.get(ENTRY)
        self._resumed = (checkpoint_path, entry) if isinstance(entry, dict) else None
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the engine as well: unlike when the checkpoint is loaded, it exists by now."""
        super().load_optimizer_state_dict(checkpoint)
        resumed, self._resumed = self._resumed, None
        if resumed is None or self._controller is None:
            return
        path, entry = resumed
        notes = restore(self._controller, self.settings.describe(), entry, path)
        if notes:
            rank_zero_warn(f"SAFusionStrategy resumes from {path} with differences: {'; '.join(notes)}.")
        saved_by, workers = entry.get("world_size"), self._controller.transport.world_size
        if saved_by != workers:
            plural = "" if saved_by == 1 else "s"
            rank_zero_info(
                f"SAFusionStrategy: {path} was saved by {saved_by} worker{plural} and is resumed by {workers}: each "
                f"takes the mean of the residuals that can be used, and the plan is made anew."
            )

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        self._replacing.removed(self.checkpoint_io, filepath, sweeps=self.local_rank == 0)

    @override
    def teardown(self) -> None:
        super().teardown()  # waits for asynchronous writing
        self._replacing.finished(sweeps=self.is_global_zero)
