"""A new system is a row: the recipe of docs/contributing.md, trained, listed, documented and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.systems import documented
from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.systems import EngineSystem
from safusion_command import main
from tests.models import equal, fit_both

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
    first, second = fit_both(SAFusionStrategy(system="saf-signs", density=0.05), max_epochs=2)
    assert equal(first.weights, second.weights)
    assert sum(first.losses[-10:]) < 0.8 * sum(first.losses[:10])
    assert first.figures["system"] == "saf-signs"
    assert first.figures["bytes_sent"] < 0.05 * first.figures["dense_bytes"]


def test_it_is_listed_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    main(["systems"])
    assert "saf-signs" in capsys.readouterr().out
    text = (Path(__file__).parents[2] / "docs" / "systems.md").read_text(encoding="utf-8")
    assert f"| `saf-signs` | {ROW.summary}" in documented(text)


def test_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--systems", "ddp,saf-inter,saf-signs"])
    assert "saf-signs" in capsys.readouterr().out
