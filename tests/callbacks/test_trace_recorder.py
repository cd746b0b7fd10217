"""TraceRecorder in real trainings: its trace of a model whose layers take a known time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_safusion import ConstantDensity, SAFusionStrategy
from lightning_safusion.callbacks import TraceRecorder
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion import build
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.report import run_plan
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched
from tests.simulated import TIME, Sleep, SlowTopK

FORWARD, BACKWARD = 0.02, 0.03


class SleepyClassifier(TinyClassifier):
    """Sleeps after the first layer in the forward pass, and before the first layer's gradients in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](Sleep.apply(self.net[0](x), FORWARD, BACKWARD).relu()) * self.temperature


def record(path: Path, **options: Any) -> Trace | None:
    """Trains and records on rank 0."""
    recorder = TraceRecorder(path, record_steps=4, skip_steps=4)
    strategy = SAFusionStrategy(collective="allgather", fusion="wfbp", **options)
    trainer(strategy, callbacks=[recorder], max_steps=10).fit(SleepyClassifier(), classification())
    return recorder.trace


def test_times_are_those_of_the_layers_without_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TIME.rule(monkeypatch)
    path = tmp_path / "job.json"
    zero, one = run_launched(2, lambda rank: record(path, compressor=SlowTopK(), dense_below=2560))
    assert one is None
    trace = resolve_trace(str(path))
    assert trace == zero
    by_name = {tensor.name: tensor for tensor in trace.tensors}
    assert set(by_name) == {"temperature", "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    assert by_name["net.0.weight"].shape == (256, 32)
    # what sleeps in the backward pass delays the gradients of the first layer, the selection of the second does not
    first = sum(t.backward for name, t in by_name.items() if name.startswith("net.0"))
    assert first == pytest.approx(BACKWARD)
    assert sum(tensor.backward for tensor in trace.tensors) == pytest.approx(first)
    # what follows a layer in the forward pass is charged to it, and nothing of the selection to the optimizer
    assert sum(t.forward for n, t in by_name.items() if n.startswith("net.0")) == pytest.approx(FORWARD)
    assert sum(tensor.forward for tensor in trace.tensors) == pytest.approx(FORWARD)
    assert trace.optimizer == pytest.approx(0, abs=1e-9)
    assert "2 workers" in trace.source


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_first_step_that_is_averaged_as_ddp_does_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    TIME.rule(monkeypatch)

    def run(rank: int) -> str:
        recorder, model = TraceRecorder(None, record_steps=4, skip_steps=0), SleepyClassifier()
        trainer(SAFusionStrategy(density=0.05), callbacks=[recorder], max_steps=4).fit(model, classification())
        return "" if recorder.trace is None else recorder.trace.source

    assert "medians of 2 steps" in run_launched(2, run)[0]  # without the first and the last


def test_a_recorded_trace_is_a_job_for_the_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    run_launched(2, lambda rank: record(path))
    run_plan(trace=str(path), nodes=2, gpus_per_node=1, bandwidth="1gbit", systems=["ddp", "safusion"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "SleepyClassifier" in shown
    assert "recorded: medians of 4 steps" in shown


class FailsOnce(TinyClassifier):
    """In its third batch."""

    failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and not self.failed:
            self.failed = True
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


def test_a_fit_after_one_that_failed_is_recorded() -> None:
    def run(rank: int) -> int:
        recorder, model = TraceRecorder(None, record_steps=1, skip_steps=2), FailsOnce()
        job = trainer(SAFusionStrategy(collective="allgather"), callbacks=[recorder], max_steps=6)
        with pytest.raises(ArithmeticError):
            job.fit(model, classification())
        job.fit(model, classification())
        return len(recorder._windows) if recorder.trace is None else -1

    assert run_launched(2, run) == [-1, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_recorded_steps_are_written_when_plain_ddp_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    costs = {"allgather": LinearCost(1.0, 1.0), "allreduce": LinearCost(1e-6, 1e-12)}
    monkeypatch.setattr(build, "calibrate", lambda transport, device: costs)

    def run(rank: int) -> tuple[str, str]:
        recorder = TraceRecorder(tmp_path / "job.json", record_steps=1000, skip_steps=2)
        trainer(SAFusionStrategy(density=ConstantDensity(0.05)), callbacks=[recorder], max_epochs=4).fit(
            TinyClassifier(), classification()
        )
        return (recorder.trace.source if recorder.trace else ""), caplog.text

    source, said = run_launched(2, run)[0]
    assert source.startswith("recorded: medians of ")
    assert int(source.split()[3]) < 1000
    assert "Gradients are no longer seen: its all-reduce has been predicted to be faster" in said


def test_jobs_that_cannot_be_recorded_are_refused_or_warned_about(tmp_path: Path) -> None:
    def plain(rank: int) -> Trace | None:
        recorder = TraceRecorder(tmp_path / "job.json")
        fitted = trainer(SAFusionStrategy(system="ddp"), callbacks=[recorder], max_steps=2)
        said = pytest.warns(UserWarning, match="gradients are not seen") if rank == 0 else nullcontext()
        with said:
            fitted.fit(TinyClassifier(), classification())
        return recorder.trace

    assert run_launched(2, plain) == [None, None]
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=2"):
        trainer(SAFusionStrategy(), devices=1, callbacks=[TraceRecorder("job.json")], accumulate_grad_batches=2).fit(
            TinyClassifier(), classification()
        )
