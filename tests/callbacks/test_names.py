"""Names with a meaning for rich or for a terminal are shown as they are, wherever they are printed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_safusion.callbacks import TensorMissingRateMonitor
from lightning_safusion.literal import literal
from lightning_safusion.metrics import MissingRateStatistics, TensorFigures
from lightning_safusion.profiling.figures import BufferRow, RankFigures, StepFigures, build_table
from lightning_safusion.tools.plan.report import run_plan
from lightning_safusion.tools.plan.traces import resolve_trace

NAMES = ("[/]", "[red]", "[bold]x[/bold]", ":fire:", "\x1b[31mred")
SHOWN = ("[/].weight", "[red].weight", "[bold]x[/bold].weight", ":fire:.weight", r"\x1b[31mred.weight")


def test_tensors_are_shown_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    monitor, names = TensorMissingRateMonitor(worst=30), [f"{name}.weight" for name in NAMES]
    monitor.statistics = MissingRateStatistics(names)
    monitor.statistics.add(1, TensorFigures(tuple(names), torch.ones(6, len(names), dtype=torch.float64)))
    Console(width=200).print(monitor.table())
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for name in SHOWN:
        assert name in said


def test_buffers_have_the_names_of_their_first_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        BufferRow((f"{name}.weight", "other"), "allgather", 500, 500, 1000, 2000, 1, 0.1, 0.1, 0.1, 0.1, 0.1)
        for name in NAMES
    ]
    seconds = {field.name: 0.1 for field in fields(StepFigures)}
    Console(width=200).print(build_table("steps", RankFigures((StepFigures(**seconds),)), rows))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for name in SHOWN:
        assert f"{name} +1" in said


def test_letters_of_other_languages_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(literal("größe [dim] \t 重み"))
    assert capsys.readouterr().out == "größe [dim] \\t 重み\n"


def test_a_plan_shows_paths_and_texts_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    replace(resolve_trace("resnet-50"), name="[red]net", source="[/] \x1b[31m").save(Path("trace.json"))
    run_plan(trace="trace.json", output="[blue]")
    said = capsys.readouterr().out
    assert "[red]net" in said
    assert r"Times of the trace: [/] \x1b[31m." in said
    assert "[blue]" in said
