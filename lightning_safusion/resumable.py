"""The part of the strategy that deals with checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_safusion import checkpoint as side_files
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.settings import EngineSettings


class ResumableDDPStrategy(DDPStrategy):
    """DDP with checkpoints that hold an engine's state as well: side files of every rank, an entry in the main file."""

    settings: EngineSettings
    _controller: Engine | None = None  # runs the gradients; None with plain DDP
    _ended: Engine | None = None  # of a fit that has ended: it may still be saved
    _resumed: tuple[_PATH, dict[str, Any]] | None = None  # checkpoint being restored, our entry in it

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Writes one side file per rank as well, unless the checkpoint holds weights only; all ranks call it."""
        controller = self._controller
        if controller is None and torch.distributed.is_initialized():
            controller = self._ended
        if controller is not None and "optimizer_states" in checkpoint:
            # First, so that no main file is ever there before its side files
            checkpoint[side_files.ENTRY] = side_files.save(controller, self.settings.describe(), filepath)
        elif self.is_global_zero:
            side_files.remove(filepath)  # of a checkpoint that is overwritten
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        # Lightning before 2.6 does not know weights_only
        options = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = super().load_checkpoint(checkpoint_path, **options)
        entry = checkpoint.get(side_files.ENTRY)
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
        notes = side_files.restore(self._controller, self.settings.describe(), entry, path)
        if notes:
            rank_zero_warn(f"SAFusionStrategy resumes from {path} with differences: {'; '.join(notes)}.")

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:  # of every node: their folders need not be one
            side_files.remove(filepath)
