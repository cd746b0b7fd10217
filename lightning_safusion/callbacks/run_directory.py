"""Where callbacks leave their files."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer


def run_directory(trainer: Trainer, dirpath: str | Path | None) -> Path:
    """The run's directory, the same on all ranks. Every rank must ask, for the answer is rank 0's.

    Args:
        trainer: Its first logger's directory is taken, or its ``default_root_dir``; files go to ``safusion`` in it.
        dirpath: A directory to take instead.
    """
    folder = trainer.log_dir or trainer.default_root_dir  # a collective
    return Path(folder) / "safusion" if dirpath is None else Path(dirpath)
