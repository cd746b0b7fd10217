"""The learning curves of the docs: read from the logs, tabulated and drawn; only what is missing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import perplexity

METRICS = "epoch,loss,step,val_perplexity\n0,4.5,9,\n0,3.25,19,\n0,,23,20.5\n1,2.5,29,\n1,,47,{last}\n"


def test_finished_trainings_are_read_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(perplexity.SCHEMES):
        folder = tmp_path / f"{name} 50000 2"
        folder.mkdir()
        (folder / "metrics.csv").write_text(METRICS.format(last=4.0 + number))
    curve = perplexity.read(folder / "metrics.csv")
    assert (curve.steps, curve.losses) == ([10, 20, 30], [4.5, 3.25, 2.5])
    assert (curve.epochs, curve.perplexities) == ([24, 48], [20.5, 4.0 + number])

    perplexity.perplexity(50_000, 2, tmp_path, tmp_path / "images" / "x.png")
    printed = capsys.readouterr().out
    assert "| epoch | 1 | 2 |" in printed
    assert "| dense DDP | 20.50 | 4.00 |" in printed
    assert 8 < float(printed.rsplit("Bigram model: ", 1)[1]) < 14
    assert (tmp_path / "images" / "x.png").stat().st_size > 10_000


def test_an_interrupted_training_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = list(perplexity.SCHEMES)[:1]
    (tmp_path / f"{name} 50000 3").mkdir()
    (tmp_path / f"{name} 50000 3" / "metrics.csv").write_text(METRICS.format(last=4.0))  # two epochs of three

    def train(folder: Path, *_: object) -> None:
        raise InterruptedError(folder.name)

    monkeypatch.setattr(perplexity, "train", train)
    with pytest.raises(InterruptedError, match=f"{name} 50000 3"):
        perplexity.perplexity(50_000, 3, tmp_path)
