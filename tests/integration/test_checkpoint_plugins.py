"""Plugins for checkpoints with storage of their own: rank 0 alone writes to it, and all residuals are there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.test_checkpoint import complaints, ours
from tests.models import equal
from tests.process_group import run_ranks
from tests.resume import parameters, run, saving


class Store(CheckpointIO):
    """Objects by key; no key is the path of a file. Like many a store, it takes writes from the first process only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, path: Any) -> Path:
        scheme, _, key = str(path).partition("://")
        assert scheme in ("artifacts", "/proc/nowhere/a.ckpt"), path
        return self.folder / (key.replace("/", "-") or "unwritable")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert dist.get_rank() == 0
        torch.save(checkpoint, self._place(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self._place(path), map_location, weights_only=weights_only)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        self._place(path).unlink()


class Distributed(Store):
    """As PyTorch's distributed checkpoints, each a folder with files of its own."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        dcp.save(checkpoint, checkpoint_id=self._place(path), no_dist=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        whole = self.folder.parent / f"{self.folder.name}-{dist.get_rank()}.pt"
        dcp_to_torch_save(self._place(path), whole)
        loaded: dict[str, Any] = torch.load(whole, map_location, weights_only=weights_only)
        for optimizer in loaded["optimizer_states"]:  # whose numbers of parameters have become texts
            optimizer["state"] = {int(number): state for number, state in optimizer["state"].items()}
        return loaded


PLUGINS = {
    "store": Store,
    "distributed": Distributed,
    "asynchronous": lambda folder: AsyncCheckpointIO(Store(folder)),
}


def _resume(rank: int, folder: Path, path: str, plugin: str) -> dict[str, Any]:
    def plugins() -> list[CheckpointIO]:
        return [PLUGINS[plugin](folder)]

    with complaints() as said:
        # twice, so that the second replaces the first
        saves = saving(path, 2), saving(path, 4)
        whole = run(ours(), 8, *saves, plugins=plugins(), deterministic=True)
        resumed = run(ours(), 8, ckpt=path, plugins=plugins(), deterministic=True)
    return {"complaints": said, "same": equal(parameters(whole), parameters(resumed))}


@pytest.mark.parametrize("plugin", list(PLUGINS))
@pytest.mark.parametrize("path", ["artifacts://run/a.ckpt", "/proc/nowhere/a.ckpt"])
def test_checkpoints_in_a_store_resume_bit_for_bit(tmp_path: Path, path: str, plugin: str) -> None:
    before = set(os.listdir())
    assert run_ranks(2, _resume, tmp_path, path, plugin) == [{"complaints": [], "same": True}] * 2
    assert len(list(tmp_path.iterdir())) == 1
    assert set(os.listdir()) == before


def _continue(rank: int, folder: Path, step: int) -> list[str]:
    earlier = "artifacts://0" if step > 3 else None
    with complaints() as said:
        # at the first step it saves what it has restored
        run(ours(), step, saving(f"artifacts://{step - 3}", 3), ckpt=earlier, plugins=[Store(folder)])
    return said


def _damaged(rank: int, folder: Path) -> list[str]:
    with complaints() as said:
        run(ours(), 5, ckpt="artifacts://0", plugins=[Store(folder)])
    return said


def test_a_damaged_part_in_a_store_is_noticed_by_all(tmp_path: Path) -> None:
    run_ranks(2, _continue, tmp_path, 3)
    checkpoint = torch.load(tmp_path / "0", weights_only=True)
    checkpoint["safusion"]["parts"][1][5000] ^= 16
    torch.save(checkpoint, tmp_path / "0")
    first, second = run_ranks(2, _damaged, tmp_path)
    assert "the part of rank 1 in artifacts://0 is damaged" in first[0]
    assert second == []
