"""The demo: data and figures by hand, then a whole short run with real processes."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_safusion.tools.demo.curves import History
from lightning_safusion.tools.demo.digits import DigitsNet, load_digits
from lightning_safusion.tools.demo.run import SYSTEMS, Settings, compare
from tests.process_group import run_alone

TINY = {"epochs": 1, "batch_size": 64, "widths": (8, 32)}


def rows(dataset: torch.utils.data.TensorDataset) -> set[bytes]:
    """The images with their labels, comparable."""
    images, labels = dataset.tensors
    return {image.numpy().tobytes() + bytes([int(label)]) for image, label in zip(images, labels, strict=True)}


def test_split_is_disjoint_complete_and_decided_by_the_seed() -> None:
    training, validation = load_digits(seed=3)
    assert (len(training), len(validation)) == (1348, 449)
    assert not rows(training) & rows(validation)
    assert float(training.tensors[0].max()) == 1.0
    again, other = load_digits(seed=3)[0], load_digits(seed=4)[0]
    assert torch.equal(training.tensors[1], again.tensors[1])
    assert not torch.equal(training.tensors[1], other.tensors[1])


def test_the_network_is_uneven() -> None:
    settings = Settings(systems=("ddp",))
    sizes = [parameter.numel() for parameter in DigitsNet(settings.widths, settings.lr, steps=1).parameters()]
    assert min(sizes) <= 16
    assert max(sizes) > 100_000
    assert len(sizes) > 50


def test_figures_of_a_history() -> None:
    steps: list[dict[str, float]] = [
        {"seconds": 9.0, "bytes_sent": 900.0, "density": 1.0, "loss": 4.0},  # the first step is no typical step
        {"seconds": 0.1, "bytes_sent": 80.0, "density": 0.1, "loss": 2.0, "tensors_missing": 1},
        {"seconds": 0.3, "bytes_sent": 90.0, "density": 0.1, "loss": 1.0},
        {"seconds": 0.2, "bytes_sent": 80.0, "density": 0.1, "loss": 0.5, "tensors_missing": 3},
    ]
    history = History("safusion", [{"tensors": 4, "tensors_missing": 0, **step} for step in steps], [0.5, 0.75])
    assert history.missing_share == 4 / 16
    assert history.median("density") == pytest.approx(0.1)
    assert history.median("bytes_sent") == 80
    assert history.median("seconds") == pytest.approx(0.2)
    assert history.epoch_losses() == [3.0, 0.75]


@pytest.mark.slow
def test_a_failed_training_is_reported_with_its_log(tmp_path: Path) -> None:
    broken = Settings(systems=("ddp",), **{**TINY, "widths": ()})
    with pytest.raises(RuntimeError, match=r"worker of 'ddp' failed: .*ddp\.log"):
        run_alone(lambda: compare(broken, tmp_path, Console(file=io.StringIO())))
    assert "Traceback" in (tmp_path / "ddp.log").read_text()


@pytest.mark.slow
def test_a_short_run_of_every_system(tmp_path: Path) -> None:
    names = (*SYSTEMS, "safusion[memory=none]")
    settings = Settings(systems=names, density=0.05, **TINY)

    def run() -> tuple[list[History], str]:
        screen = io.StringIO()
        return compare(settings, tmp_path, Console(file=screen, width=120)), screen.getvalue()

    found, text = run_alone(run)  # in a process without threads, for workers are forked
    histories = {row.system: row for row in found}
    assert list(histories) == list(names)
    for history in histories.values():
        assert len(history.steps) == len(settings.loaders(rank=0)[0]) == 10
        assert 0 <= history.accuracies[-1] <= 1
        assert all(math.isfinite(each["loss"]) and each["exposed_s"] >= 0 for each in history.steps)
    # The common start: the first loss is computed before anything was exchanged.
    assert len({history.steps[0]["loss"] for history in histories.values()}) == 1

    dense = histories.pop("ddp")
    for history in histories.values():
        assert history.median("bytes_sent") < dense.median("bytes_sent") / 2
        assert 0 < history.median("density") < 0.2
    assert histories["safusion"].missing_share == 0
    assert histories["safusion[memory=none]"].missing_share == 0
    assert histories["behind[memory=none]"].missing_share > 0

    assert all(system in text for system in names)
    picture = tmp_path / "curves.png"
    assert str(picture) in text
    assert picture.read_bytes().startswith(b"\x89PNG")
