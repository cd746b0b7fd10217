"""Files of a run: an error of writing is a warning, and training continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_safusion.callbacks import OverlapProfiler, TensorMissingRateMonitor
from tests.callbacks.test_missing_rate import strategy
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched


def test_what_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")

    def run(rank: int) -> int:
        monitor = TensorMissingRateMonitor(every_n_steps=1, worst=0, dirpath=tmp_path / "file" / "run")
        profiler = OverlapProfiler(every_n_steps=1, table=False, dirpath=tmp_path / "file" / "run")
        fitting = trainer(strategy(), callbacks=[monitor, profiler], limit_train_batches=2)
        if rank == 0:
            with pytest.warns(UserWarning, match=r"nothing was written to .*file/run .*choose a directory with room"):
                fitting.fit(TinyClassifier(), classification())
        else:
            fitting.fit(TinyClassifier(), classification())
        return fitting.global_step

    assert run_launched(2, run) == [2, 2]
