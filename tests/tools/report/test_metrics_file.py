"""Reading ``metrics.csv``: as Lightning's logger writes it, damaged, empty, too short, with NaN."""

from __future__ import annotations

from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_safusion.tools.report.metrics_file import Logged, find_metrics, read_metrics


def write_csv(folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> Path:
    """Writes rows as a Trainer's CSVLogger does, and returns the folder."""
    logger = CSVLogger(folder.parent, name=None, version=folder.name)
    for step, row in rows:
        logger.log_metrics(row, step)
    logger.save()
    return folder


def read(folder: Path) -> Logged:
    path = find_metrics(folder)
    assert path is not None
    return read_metrics(path)


def test_what_the_logger_writes_comes_back(tmp_path: Path) -> None:
    rows = [(9, {"loss": 2.0, "epoch": 0}), (9, {"train/time": 1.0}), (12, {"val_accuracy": 0.5, "epoch": 0})]
    rows += [(19, {"loss": 1.0, "epoch": 1}), (19, {"train/time": 2.0}), (22, {"val_accuracy": 0.75, "lr-SGD": 0.1})]
    run = read(write_csv(tmp_path / "run", [*rows, (19, {"safusion/sent_mb": 0.5, "train/device/batches_per_sec": 3})]))
    assert run.results == ["loss", "val_accuracy"]
    assert run.curves["loss"].steps.tolist() == [9, 19]
    assert run.curves["val_accuracy"].values.tolist() == [0.5, 0.75]
    assert (run.last_step, run.step_s, run.mean("safusion/sent_mb")) == (22, pytest.approx(0.1), 0.5)
    assert (run.latest("loss"), run.latest("nothing"), run.typical("nothing")) == (1.0, None, None)


def test_times_are_on_a_line_between_those_that_were_logged_and_unknown_elsewhere(tmp_path: Path) -> None:
    run = read(write_csv(tmp_path / "run", [(step, {"train|time": (step + 1) * 0.1}) for step in (9, 19)]))
    seconds = run.seconds(np.array([5, 9, 14, 29, 30]))
    assert seconds[1:4].tolist() == pytest.approx([1.0, 1.5, 3.0])  # one interval beyond the last
    assert isnan(seconds[0])
    assert isnan(seconds[4])
    silent = read(write_csv(tmp_path / "silent", [(step, {"loss": 1.0}) for step in (9, 19)]))
    assert np.isnan(silent.seconds(np.array([9]))).all()
    back = read(write_csv(tmp_path / "back", [(step, {"train/time": 1.0 - step / 100}) for step in (9, 19)]))
    assert (back.times, back.step_s) == (None, None)
    twice = read(write_csv(tmp_path / "twice", [(9, {"train/time": 1.0}), (9, {"train/time": 2.0})]))
    assert (twice.times, twice.step_s) == (None, None)


def test_plain_ddp_is_seen_by_rows_of_the_step_without_figures_of_the_exchange(tmp_path: Path) -> None:
    def rows(until: int) -> list[tuple[int, dict[str, float]]]:
        logged = [(s, {"loss": 1.0} | ({"safusion/sent_mb": 0.1} if s < until else {})) for s in range(9, 60, 10)]
        return [*logged, (60, {"val_loss": 1.0})]

    assert read(write_csv(tmp_path / "left", rows(30))).handed_over == 29
    assert read(write_csv(tmp_path / "stays", rows(100))).handed_over is None
    assert read(write_csv(tmp_path / "ddp", rows(0))).handed_over is None


def test_numbers_that_are_not_finite_stay_in_curves_and_out_of_means(tmp_path: Path) -> None:
    run = read(write_csv(tmp_path / "run", [(0, {"loss": 1.0}), (1, {"loss": nan}), (2, {"loss": inf})]))
    assert run.curves["loss"].steps.tolist() == [0, 1, 2]
    assert (run.mean("loss"), run.latest("loss")) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows.*let the training run on"),
        ("step,loss\n", "has no rows"),
        ("step,loss\n1,2.0\n", "has one row, and a curve needs two.*log_every_n_steps"),
        ("a,b\n1,2\n3,4\n", "has no column 'step': give metrics.csv of Lightning's CSVLogger"),
        ("step,loss\n,1\n2,3\n", "has a row without a step"),
        ("step,loss\ninf,1\n2,3\n", "has a row without a step"),
        (b"\xff\xfe\x00", "cannot be read as CSV"),
    ],
)
def test_a_file_that_cannot_be_shown_is_named_with_what_to_do(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"metrics\.csv {message}"):
        read_metrics(path)


def test_text_is_no_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,note\n1,2.0,good\n2,1.0,\n", encoding="utf-8-sig")  # as spreadsheets save it
    assert set(read_metrics(path).curves) == {"step", "loss"}


def test_a_run_is_found_by_its_file_its_folder_and_the_profilers_folder(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", [(0, {"loss": 1.0}), (1, {"loss": 1.0})])
    (folder / "safusion").mkdir()
    for given in (folder, folder / "metrics.csv", folder / "safusion"):
        assert find_metrics(given) == folder / "metrics.csv"
    assert find_metrics(tmp_path) is None
