"""Checkpoints of earlier versions resume bit for bit.

``tests/data/format_1`` is from commit e02ccde, before the first change of the format: ``rank_00000.pt`` and so on in
one folder per name, without digests. It was made there by two ranks (``tests.process_group.run_ranks``) that called::

    run(tests.test_checkpoint.ours(), 4, saving(folder / "old.ckpt", 4), deterministic=True)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.integration.test_checkpoint import complaints, ours
from tests.models import equal
from tests.process_group import run_ranks
from tests.resume import held_back, parameters, run, saving

OLD = Path(__file__).parents[1] / "data" / "format_1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "job"))


def _resume_old(rank: int, folder: Path) -> tuple[list[str], int, bool]:
    with complaints() as said:
        resumed = run(ours(), 9, saving(folder / "again.ckpt", 4), ckpt=folder / "old.ckpt", deterministic=True)
        whole = run(ours(), 9, saving(folder / "whole.ckpt", 4), deterministic=True)
    return said, resumed.strategy.figures()["windows"], equal(parameters(resumed), parameters(whole))


def test_a_checkpoint_of_format_1_resumes_bit_for_bit(folder: Path) -> None:
    results = run_ranks(2, _resume_old, folder)
    assert [(warned, windows) for warned, windows, _ in results] == [([], 9)] * 2
    old, again, whole = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("old", "again", "whole"))
    assert old["safusion"]["format"] == 1
    since = {"shares": [[], []], "first_windows": {"steps": 0.0, "share": 0.0, "began": 0}}
    assert again["safusion"]["engine"] == old["safusion"]["engine"] | since
    for rank in range(2):
        part = torch.load(OLD / "old.ckpt.safusion" / f"rank_{rank:05d}.pt", weights_only=True)
        restored = held_back(folder / "again.ckpt.safusion", rank)
        for name, residual in part["memory"]["residual"].items():
            assert torch.equal(restored[name], residual), name
    # another processor or torch may have rounded the first four steps in another way
    if equal(list(whole["state_dict"].values()), list(old["state_dict"].values())):
        assert all(same for *_, same in results)


def _overwrite_old(rank: int, folder: Path) -> None:
    run(ours(), 5, saving(folder / "old.ckpt", 5), ckpt=folder / "old.ckpt")


def test_parts_of_format_1_go_once_their_checkpoint_is_replaced(folder: Path) -> None:
    run_ranks(2, _overwrite_old, folder)
    nonce = torch.load(folder / "old.ckpt", weights_only=True)["safusion"]["nonce"]
    names = sorted(path.name for path in (folder / "old.ckpt.safusion").iterdir())
    assert names == [f"rank_0000{rank}-{nonce}.pt" for rank in range(2)]
