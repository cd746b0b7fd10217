"""Residuals in the checkpoints of Lightning's ModelParallelStrategy, which are folders, or one file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _METADATA_FILENAME

from lightning_safusion.announce import rank_zero_warn
from lightning_safusion.comm.transport.interface import during
from lightning_safusion.integration.attached_state import AttachedState
from lightning_safusion.integration.checkpoint.parts import ENTRY


def begin_folder(path: Path) -> None:
    """Makes room for a checkpoint, and of an earlier one there something that nobody takes for one. On one worker."""
    if path.is_file():
        path.unlink()
    (path / _METADATA_FILENAME).unlink(missing_ok=True)
    shutil.rmtree(path / ENTRY, ignore_errors=True)


def save_residuals(path: Path, attached: Sequence[AttachedState]) -> None:
    """Writes the residuals of all sharded models into a folder of a checkpoint. Collective."""
    if attached:
        with during(f"the save of {path / ENTRY}"):
            states = {f"{number}": each.distributed_state_dict() for number, each in enumerate(attached)}
            dcp.save(states, checkpoint_id=path / ENTRY)


def load_residuals(
    saved: Any, path: Path, attached: Sequence[AttachedState], broadcast: Callable[[bool], bool]
) -> None:
    """Restores what a checkpoint has of the residuals. Collective.

    Args:
        saved: Its entry: number of the models whose residuals lie in its folder, or the states of one or several.
        path: Of the checkpoint.
        attached: What is below each sharded model.
        broadcast: Tells all workers what the first one knows.
    """
    if not isinstance(saved, int):
        states = [saved] if isinstance(saved, dict) else saved
        _compare(len(states), attached, path)
        for each, state in zip(attached, states, strict=False):
            each.load_state_dict(state, path)
        return
    folder = path / ENTRY
    if saved and not broadcast((folder / ".metadata").is_file()):
        rank_zero_warn(
            f"SAFusion resumes with differences: {folder} is not there, or was not written to its end, so that "
            "every worker begins with empty residuals: what the workers had accumulated and not sent yet is lost."
        )
        return
    _compare(saved, attached, path)
    for number, each in enumerate(attached[:saved]):
        each.load_distributed(folder, f"{number}")


def _compare(saved: int, attached: Sequence[AttachedState], path: Path) -> None:
    if saved and saved != len(attached):
        rank_zero_warn(
            f"SAFusion: {path} has residuals of {saved} sharded models, this one has {len(attached)}: they are "
            "taken in their order."
        )
