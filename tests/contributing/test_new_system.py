"""A new system is a row: the recipe of docs/contributing.md, trained, listed, documented and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.systems import documented
from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.systems import EngineSystem
from safusion_command import main
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

ROW = EngineSystem(
    "saf-signs",
    "before fusion; a fixed number of tensors per buffer; of each value its sign",
    "this package",
    "aligned",
    collective="allgather",
    wire="sign",
)


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, ROW.name, ROW)


def test_it_trains() -> None:
    def train(rank: int) -> tuple[list[Tensor], list[float], dict[str, object]]:
        strategy = SAFusionStrategy(system="saf-signs", density=0.05)
        model = TinyClassifier()
        trainer(strategy, max_epochs=2).fit(model, classification())
        return [param.detach() for param in model.parameters()], model.losses, strategy.figures()

    (first, losses, report), (second, _, _) = run_launched(2, train)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert report["system"] == "saf-signs"
    assert report["bytes_sent"] < 0.05 * report["dense_bytes"]  # type: ignore[operator]


def test_it_is_listed_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    main(["systems"])
    assert "saf-signs" in capsys.readouterr().out
    text = (Path(__file__).parents[2] / "docs" / "systems.md").read_text(encoding="utf-8")
    assert f"| `saf-signs` | {ROW.summary}" in documented(text)


def test_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--systems", "ddp,saf-inter,saf-signs"])
    assert "saf-signs" in capsys.readouterr().out
