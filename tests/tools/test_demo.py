"""The demo: data and figures by hand, then a whole short run with real processes."""

from __future__ import annotations

import io
import math
import os
import socket
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_safusion.kernels import cpu as native
from lightning_safusion.tools.demo import run as demo
from lightning_safusion.tools.demo.curves import Comparison, History, Step
from lightning_safusion.tools.demo.digits import DigitsNet, load_digits
from lightning_safusion.tools.demo.link import paced_rate, sent_bytes
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
    sizes = [parameter.numel() for parameter in DigitsNet(settings.widths, torch.optim.SGD, steps=1).parameters()]
    assert min(sizes) <= 16
    assert max(sizes) > 100_000
    assert len(sizes) > 50


def history(system: str, seconds: float, sent: float, accuracies: list[float]) -> History:
    """Two steps of an epoch; the first one is no usual step."""
    steps = [Step(4.0, 2 * seconds, 900.0, 0.0), Step(2.0, seconds, sent, 0.25)] * len(accuracies)
    return History(system, system, steps, accuracies)


def test_figures_of_a_history() -> None:
    made = history("safusion", 0.5, 80.0, [0.5, 0.75])
    assert made.usual("seconds") == 0.5  # of the last quarter
    assert made.total("bytes_sent") == 1960
    assert made.missing == 0.125
    assert made.epoch_ends() == [1.5, 3.0]
    assert made.seconds_to(0.6) == 3.0
    assert made.seconds_to(0.8) is None


def test_the_conclusion_says_how_much_faster_and_what_is_noise() -> None:
    dense, ours = history("ddp", 4.0, 900.0, [0.5, 0.9]), history("saf-pooled", 0.5, 80.0, [0.9, 0.89])
    said = " ".join(Comparison([dense, ours], 450).conclusions())
    assert "a step takes 500 ms, with ddp 4000 ms: 8.0 times as fast" in said
    assert "Until 86.0%: 16.0 times as fast" in said  # after one epoch in place of two
    assert "8.9% of the bytes of ddp, over all steps 54.4%" in said
    assert "differs by -1.0 points, which is noise" in said
    assert "Faster still" not in said
    lost = history("saf-pooled", 5.0, 80.0, [0.1, 0.2])
    worse = " ".join(Comparison([dense, lost], 450).conclusions())
    assert "1.2 times as long" in worse
    assert "Until 86.0%: never" in worse
    assert "more than noise" in worse
    assert "Faster still: ddp, 24.0 s" in worse


def test_a_kernel_that_does_not_say_what_it_sent_costs_the_figures_alone() -> None:
    unsaid = [History(name, name, [Step(2.0, 0.5, 0, 0.0)] * 2, [0.9]) for name in ("ddp", "saf-pooled")]
    comparison = Comparison(unsaid, 450)
    assert "bytes" not in " ".join(comparison.conclusions())
    assert list(comparison.table("").columns[2].cells) == ["unknown", "unknown"]


def test_bytes_of_connections_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = sent_bytes()
            sender.sendall(bytes(12345))
            assert sent_bytes() - before == 12345


def test_connections_that_close_meanwhile_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, links = os.listdir, os.readlink
    monkeypatch.setattr(os, "listdir", lambda path: [*listed(path), "987654"])
    monkeypatch.setattr(os, "readlink", lambda path: "socket:[1]" if path.endswith("987654") else links(path))
    assert sent_bytes() >= 0


@pytest.mark.slow
def test_the_kernel_paces_connections() -> None:
    assert paced_rate(2e6) < 1.5 * 2e6  # unpaced, it is a thousand times as much
    assert paced_rate(1e9) > 2e7


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (1.1, "(110 measured), as a link between machines would"),
        (0.5, "(50 measured), more than this machine carries"),
        (80.0, "does not pace connections: 8000 Mbit/s measured in place of 100."),
    ],
)
def test_the_link_is_what_was_measured(
    measured: float, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "paced_rate", lambda rate: measured * rate)
    monkeypatch.setattr(demo, "started", lambda *_: pytest.fail("it trains"))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    screen = io.StringIO()
    with pytest.raises(pytest.fail.Exception):
        compare(Settings(systems=("ddp",)), tmp_path, Console(file=screen, width=200))
    assert told in screen.getvalue()


def test_more_workers_than_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers is 60: there are not 24 images for each, give fewer"):
        compare(Settings(systems=("ddp",), workers=60), tmp_path, Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_failed_training_is_reported_with_its_log(tmp_path: Path) -> None:
    broken = Settings(systems=("ddp",), bandwidth=None, **{**TINY, "widths": ()})
    with pytest.raises(RuntimeError, match=r"worker of 'DDP' failed: .*ddp/log"):
        run_alone(lambda: compare(broken, tmp_path, Console(file=io.StringIO())))
    assert "Traceback" in (tmp_path / "ddp/log").read_text()


@pytest.mark.slow
def test_a_short_run_of_every_system(tmp_path: Path) -> None:
    names = (*SYSTEMS, "safusion", "behind[memory=none]", "safusion[memory=none]")
    settings = Settings(systems=names, density=0.05, bandwidth="1gbit", **TINY)

    def run() -> tuple[list[History], str]:
        screen = io.StringIO()
        return compare(settings, tmp_path, Console(file=screen, width=120)), screen.getvalue()

    found, text = run_alone(run)  # in a process without threads, for workers are forked
    histories = {row.system: row for row in found}
    assert list(histories) == list(names)
    for each in histories.values():
        assert len(each.steps) == len(settings.loaders(rank=0)[0]) == 10
        assert 0 <= each.accuracies[-1] <= 1
        assert all(math.isfinite(step.loss) for step in each.steps)
    # The common start: the first loss is computed before anything was exchanged.
    assert len({each.steps[0].loss for each in histories.values()}) == 1

    dense = histories.pop("ddp")
    del histories["powersgd"]  # begins after ten dense steps
    assert all(each.usual("bytes_sent") < 0.6 * dense.usual("bytes_sent") for each in histories.values())
    assert histories["safusion"].missing == 0
    assert histories["safusion[memory=none]"].missing == 0
    assert histories["behind[memory=none]"].missing > 0

    assert all(each.title in text for each in found)
    assert "The kernel paces the workers' connections at 1000 Mbit/s" in text
    assert ("NumPy selects" in text) != native.usable()
    assert "With the default a step takes" in text
    for name in ("curves.png", "step.png"):
        assert str(tmp_path / name) in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
