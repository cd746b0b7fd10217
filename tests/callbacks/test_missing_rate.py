"""TensorMissingRateMonitor in real trainings on two ranks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from torch import Tensor, nn
from typing_extensions import override

from lightning_safusion import Aligned, SAFusionStrategy
from lightning_safusion.callbacks import OverlapProfiler, TensorMissingRateMonitor
from lightning_safusion.metrics.figures import TensorFigures
from lightning_safusion.metrics.history import MissingRateStatistics
from lightning_safusion.tools.report.page import load_run
from tests.models import TakeTurns, TinyClassifier, classification, trainer
from tests.process_group import run_launched

KEYS = {
    "safusion/missing_rate",
    "safusion/missing_on_all_ranks",
    "safusion/achieved_density",
    "safusion/compression_error",
}


def strategy(system: str = "behind", **options: Any) -> SAFusionStrategy:
    fixed = {"fusion": Aligned(8), "compressor": "topk", "collective": "allgather", "process_group_backend": "gloo"}
    return SAFusionStrategy(system=system, **({"density": 0.01} | fixed | options))


class Loudest(LightningModule):
    """The first layer's gradients are far larger than those of the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loud, self.quiet = nn.Linear(32, 64), nn.Linear(64, 10)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loud = self.loud(batch[0])
        return 1e6 * loud.sum() + nn.functional.cross_entropy(self.quiet(loud.detach()), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-9)


def fit(
    monitor: TensorMissingRateMonitor, chosen: Any, model: LightningModule | None = None, **options: Any
) -> Trainer:
    done = trainer(chosen, callbacks=[monitor, *options.pop("callbacks", [])], **options)
    done.fit(model or TinyClassifier(), classification())
    return done


@pytest.mark.parametrize("system", ["behind", "saf-inter"])
def test_after_fusion_tensors_are_missing_and_before_fusion_none(system: str) -> None:
    def each(rank: int) -> Any:
        monitor = TensorMissingRateMonitor(every_n_steps=1)
        fit(monitor, strategy(system, memory="none"), Loudest(), limit_train_batches=6)
        return monitor.statistics.rows()

    both = run_launched(2, each)
    assert both[0] == both[1]
    rows = {row.name: row for row in both[0]}
    assert list(rows) == ["loud.weight", "loud.bias", "quiet.weight", "quiet.bias"]
    if system == "behind":
        # the 64 elements of the loudest tensor leave no room for other tensors
        assert [row.missing for row in rows.values()] == [row.everywhere for row in rows.values()] == [1, 0, 1, 1]
    else:
        assert all(row.missing == 0 and row.error is not None for row in rows.values())


def test_rates_agree_with_the_reports_of_all_ranks() -> None:
    def each(rank: int) -> Any:
        monitor, reports = TensorMissingRateMonitor(every_n_steps=1), []
        watch = LambdaCallback(on_train_batch_end=lambda job, *_: reports.append(job.strategy.figures()))
        fit(monitor, strategy(), limit_train_batches=10, callbacks=[watch])
        return monitor.statistics.rates().mean(axis=0), [r["tensors_missing"] / r["tensors"] for r in reports]

    (rates, first), (_, second) = run_launched(2, each)
    assert rates.tolist() == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert 0.2 < rates[-1] < 1


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [4, 8, 12, 16, 20]), (3, [4])])
def test_every_logger_gets_every_nth_optimizer_step(tmp_path: Path, accumulate: int, steps: list[int]) -> None:
    def each(rank: int) -> None:
        loggers = [CSVLogger(tmp_path / name, version=0) for name in ("one", "two")]
        monitor = TensorMissingRateMonitor(every_n_steps=4, per_tensor=True)
        options = {"accumulate_grad_batches": accumulate, "logger": loggers, "log_every_n_steps": 10**6}
        fit(monitor, strategy(), default_root_dir=tmp_path, **options)

    run_launched(2, each)
    for name in ("one", "two"):
        with open(next((tmp_path / name).rglob("metrics.csv"))) as file:
            rows = [row for row in csv.DictReader(file) if row["safusion/missing_rate"]]
        assert [int(row["step"]) for row in rows] == [step - 1 for step in steps]  # as Lightning's own values
        assert set(rows[0]) >= KEYS
        names = [name for name, _ in TinyClassifier().named_parameters()]
        mean = sum(float(rows[0][f"safusion/missing_rate/{name}"]) for name in names) / len(names)
        assert mean == pytest.approx(float(rows[0]["safusion/missing_rate"]))


def test_tensors_of_all_optimizers_are_sampled() -> None:
    def each(rank: int) -> Any:
        monitor = TensorMissingRateMonitor(every_n_steps=4)
        chosen = strategy(find_unused_parameters=True)
        fit(monitor, chosen, TakeTurns(), limit_train_batches=6)
        return [row.name for row in monitor.statistics.rows()], monitor.statistics.samples

    for names, samples in run_launched(2, each):
        assert sorted(names) == sorted(name for name, _ in TinyClassifier().named_parameters())
        assert samples == 3  # global_step counts both optimizers


def test_a_resumed_training_continues_the_statistics(tmp_path: Path) -> None:
    def each(rank: int) -> Any:
        monitor = TensorMissingRateMonitor(every_n_steps=2)
        first = fit(monitor, strategy(), limit_train_batches=6)
        first.save_checkpoint(tmp_path / "last.ckpt")
        again = TensorMissingRateMonitor(every_n_steps=2)
        second = trainer(strategy(), callbacks=[again], limit_train_batches=6, max_epochs=2)
        second.fit(TinyClassifier(), classification(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
        return monitor.statistics.rates().tolist(), again.statistics.rates().tolist(), again.statistics.rows()

    results = run_launched(2, each)
    for before, after, rows in results:
        assert [row[:3] for row in after] == before
        assert len(after[0]) == 6
        assert rows == results[0][2]


def test_the_state_of_another_model_is_ignored() -> None:
    monitor = TensorMissingRateMonitor(every_n_steps=1)
    with pytest.raises(RuntimeError, match="there are no statistics in this process"):
        monitor.heatmap()
    assert monitor.state_dict() == {}
    monitor.load_state_dict({})
    fit(monitor, strategy(), devices=1, limit_train_batches=1)
    mine = monitor.statistics
    other = TensorMissingRateMonitor()
    fit(other, strategy(), Loudest(), devices=1, limit_train_batches=1)
    with pytest.warns(UserWarning, match=r"begins anew: the checkpoint's model differs in loud.bias, loud.weight"):
        monitor.load_state_dict(other.state_dict())
    assert monitor.statistics is mine
    loaded = TensorMissingRateMonitor()
    loaded.load_state_dict(other.state_dict())  # without a trainer, to look at it
    assert loaded.statistics.names[0] == "loud.weight"


def test_the_picture_has_a_row_per_tensor_and_a_column_per_sample() -> None:
    monitor = TensorMissingRateMonitor()
    statistics = monitor.statistics = MissingRateStatistics([f"layer{index}" for index in range(100)])
    with pytest.raises(ValueError, match="nothing was sampled"):
        monitor.heatmap()
    sums = torch.tensor([[2.0], [1.0], [8.0], [1.0], [1.0], [0.5]], dtype=torch.float64)
    for step in (5, 9):
        statistics.add(step, TensorFigures(("layer7",), sums))
    ax = Figure().subplots()
    assert monitor.heatmap(ax) is ax.figure
    assert ax.images[0].get_array()[7].tolist() == [0.5, 0.5]  # type: ignore[index]
    assert len(ax.get_yticks()) <= 32
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["5", "9"]


def test_plain_ddp_is_logged_once_and_nothing_is_sampled(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monitor = TensorMissingRateMonitor(every_n_steps=1, heatmap_file=tmp_path / "none.png")
    with caplog.at_level("INFO"):
        fit(monitor, strategy(), devices=1, limit_train_batches=3)
    said = [record.message for record in caplog.records if "TensorMissingRateMonitor" in record.message]
    assert len(said) == 1
    assert "plain DDP sends every tensor dense" in said[0]
    assert monitor.statistics.samples == 0
    assert not (tmp_path / "none.png").exists()


def test_a_report_leaves_out_files_of_an_earlier_fit(tmp_path: Path) -> None:
    def run(rank: int) -> list[tuple[float, bool]]:
        found, model = [], TinyClassifier()
        profiler, monitor = (OverlapProfiler(2, 1, tmp_path), TensorMissingRateMonitor(2, dirpath=tmp_path))
        done = trainer(strategy(), callbacks=[profiler, monitor], limit_train_batches=3, max_epochs=1)
        for epochs, callbacks in ((1, [profiler, monitor]), (2, [monitor, profiler]), (3, [profiler])):
            done.callbacks = list(callbacks)
            done.fit_loop.max_epochs = epochs
            done.fit(model, classification())
            done.strategy.barrier()
            written = load_run(tmp_path)
            found.append((written.overlap.run, written.missing is not None))
            assert (written.stale == ()) == (written.missing is not None)
        return found

    first, second = run_launched(2, run)
    assert first == second
    assert [sampled for _, sampled in first] == [True, True, False]
    assert len({began for began, _ in first}) == 3  # each fit of one trainer has a name of its own


def test_processes_of_the_trainer_leave_a_picture_and_a_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "missing.png"
    monitor = TensorMissingRateMonitor(every_n_steps=2, heatmap_file=picture)
    fit(monitor, strategy(start_method="fork"), limit_train_batches=6)
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    assert printed.count("Tensors missing:") == 1
    assert "net.1.weight" in printed
    assert monitor.statistics is None  # this process has not trained
