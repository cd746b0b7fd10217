"""Callbacks in processes that a Trainer spawns: they reach them, and what they leave is in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_safusion import Aligned, Cadence, SAFusionStrategy
from lightning_safusion.callbacks import BufferSizeTuner, OverlapProfiler, TensorMissingRateMonitor
from lightning_safusion.profiling import load_timeline, merge_timelines
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_alone


@pytest.mark.slow
def test_callbacks_of_spawned_processes_leave_their_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        profiler = OverlapProfiler(4, 2, tmp_path)
        monitor = TensorMissingRateMonitor(2, heatmap_file=tmp_path / "new" / "missing.png")
        tuner = BufferSizeTuner(Cadence(warmup_every=4, trial_windows=3))
        strategy = SAFusionStrategy(system="behind", fusion=Aligned(1), collective="allgather", start_method="spawn")
        logger = CSVLogger(tmp_path, version=0)
        options: dict[str, Any] = {"max_steps": 8, "log_every_n_steps": 1, "logger": logger}
        job = trainer(strategy, callbacks=[profiler, monitor, tuner], **options)
        job.fit(TinyClassifier(), classification())
        with pytest.raises(RuntimeError, match="load_timeline"):
            profiler.plot()
        assert monitor.statistics is None  # this process has not trained

    run_alone(train, timeout=300)
    assert load_timeline(tmp_path).step == 7
    assert merge_timelines(tmp_path).exists()
    assert (tmp_path / "new" / "missing.png").read_bytes().startswith(b"\x89PNG")
    assert capfd.readouterr().out.count("Tensors missing:") == 1
    assert "safusion/buffers" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
