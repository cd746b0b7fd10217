"""Where callbacks leave their files, and what joins those of one fit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from torch import nn

_BEGUN: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()  # by wrapped model, which every fit makes anew


def run_directory(trainer: Trainer, dirpath: str | Path | None) -> Path:
    """The run's directory, the same on all ranks. Every rank must ask, for the answer is rank 0's.

    Args:
        trainer: Its first logger's directory is taken, or its ``default_root_dir``; files go to ``safusion`` in it.
        dirpath: A directory to take instead.
    """
    folder = trainer.log_dir or trainer.default_root_dir  # a collective
    return Path(folder) / "safusion" if dirpath is None else Path(dirpath)


def run_id(trainer: Trainer) -> float:
    """When this fit began: the same for all callbacks on all ranks. Every rank must ask, for the clock is rank 0's.

    Args:
        trainer: Between the beginning of its fit and the first step.
    """
    model = trainer.strategy.model
    if model is None:
        raise RuntimeError("a run is named when training begins: there is no model yet")
    if model not in _BEGUN:
        _BEGUN[model] = float(trainer.strategy.broadcast(time.time()))
    return _BEGUN[model]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What cannot be written there is a warning: a full disk shall not lose what was trained."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"nothing was written to {folder} ({error}): choose a directory with room", stacklevel=4)
