"""What all callbacks share: what they refuse, what they log, and files, of which an error of writing is a warning."""

from __future__ import annotations

import pickle
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion.callbacks import (
    BufferSizeTuner,
    OverlapProfiler,
    ReplicaConsistencyCheck,
    TensorMissingRateMonitor,
    TraceRecorder,
)
from tests.callbacks.test_missing_rate import strategy
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched


def test_loggers_get_the_epoch_and_no_figure_that_was_not_measured() -> None:
    logger = Mock()
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    fitting: Any = SimpleNamespace(loggers=[logger], fit_loop=loop, current_epoch=3)
    OverlapProfiler()._log(fitting, {"step_s": 0.5, "skew_s": nan, "density": None})
    OverlapProfiler()._log(fitting, {"skew_s": nan})
    logger.log_metrics.assert_called_once_with({"safusion/step_s": 0.5, "epoch": 3}, step=7)


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


DOES = {
    BufferSizeTuner(): "sizes the buffers of",
    OverlapProfiler(): "times",
    ReplicaConsistencyCheck(): "compares the replicas of",
    TensorMissingRateMonitor(): "samples",
    TraceRecorder(None): "records",
}


@pytest.mark.parametrize("callback", DOES)
def test_processes_that_a_trainer_spawns_get_it(callback: Callback) -> None:
    received = pickle.loads(pickle.dumps(callback))  # noqa: S301 - of this test itself
    assert vars(received).keys() == vars(callback).keys()


@pytest.mark.parametrize(("callback", "does"), DOES.items(), ids=lambda each: type(each).__name__)
def test_another_strategy_is_refused(callback: Callback, does: str) -> None:
    fitting = trainer(DDPStrategy(process_group_backend="gloo"), devices=1, callbacks=[callback])
    message = rf"{does} SAFusionStrategy, got DDPStrategy: pass Trainer\(strategy=SAFusion"
    with pytest.raises(MisconfigurationException, match=message):
        callback.setup(fitting, TinyClassifier(), "fit")
    callback.setup(fitting, TinyClassifier(), "test")  # no work outside of fit


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (OverlapProfiler, {"every_n_steps": 0}, "every_n_steps must be a whole number, 1 or more, got 0"),
        (
            OverlapProfiler,
            {"every_n_steps": 5, "record_steps": 6},
            "record_steps must be 1 to every_n_steps = 5, got 6",
        ),
        (ReplicaConsistencyCheck, {"every_n_steps": 1.5}, "every_n_steps must be a whole number, 1 or more, got 1.5"),
        (ReplicaConsistencyCheck, {"action": "stop"}, "unknown action 'stop'. Choose one of 'raise', 'warn', 'heal'"),
        (TensorMissingRateMonitor, {"every_n_steps": 0}, "every_n_steps must be a whole number, 1 or more, got 0"),
        (TensorMissingRateMonitor, {"worst": -1}, "worst is a number of rows, 0 or more, got -1"),
        (TensorMissingRateMonitor, {"columns": 3}, "even number, 2 or more, got 3"),
        (TraceRecorder, {"path": None, "record_steps": 0}, "record_steps must be 1 or more"),
        (BufferSizeTuner, {"min_elements": -1}, "min_elements.*got -1"),
    ],
)
def test_wrong_arguments_are_refused(callback: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        callback(**options)
