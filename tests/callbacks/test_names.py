"""Names with a meaning for rich or for a terminal are shown as they are, wherever they are printed.

Covers: modules called like markup, an emoji and an escape code, in the tables of a real training on two ranks; the text
    of a trace and a path in the simulator's output.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor, nn

from lightning_safusion import Aligned
from lightning_safusion.callbacks import OverlapProfiler, TensorMissingRateMonitor
from lightning_safusion.literal import literal
from lightning_safusion.profiling.figures import BufferRow, RankFigures, StepFigures, build_table
from lightning_safusion.tools.plan.report import run_plan
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.callbacks.test_missing_rate import strategy
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

NAMES = ("[/]", "[red]", "[bold]x[/bold]", ":fire:", "\x1b[31mred")
SHOWN = ("[/].weight", "[red].weight", "[bold]x[/bold].weight", ":fire:.weight", r"\x1b[31mred.weight")


class OddlyNamed(TinyClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential()
        for name in NAMES:
            self.net.add_module(name, nn.Linear(32, 32))
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(x) + 1e-6 * self.net(x)[:, :10]) * self.temperature  # little is sent of the others


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    def each(rank: int) -> str:
        said = io.StringIO()
        with redirect_stdout(said):
            monitor = TensorMissingRateMonitor(every_n_steps=1, worst=30)
            profiler = OverlapProfiler(every_n_steps=1, dirpath=tmp_path)
            chosen = strategy("behind", fusion=Aligned(1), memory="none")
            trainer(chosen, limit_train_batches=4, callbacks=[monitor, profiler]).fit(OddlyNamed(), classification())
            Console(width=200).print(monitor.table())
        return said.getvalue()

    said, _ = run_launched(2, each)
    assert "\x1b" not in said
    for name in SHOWN:
        assert f"net.{name}" in said


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


def test_a_plan_shows_paths_and_texts_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "trace.json"
    replace(resolve_trace("resnet-50"), name="[red]net", source="[/] \x1b[31m").save(given)
    output = tmp_path / "[blue]"
    run_plan(trace=str(given), output=str(output))
    said = capsys.readouterr().out
    assert "[red]net" in said
    assert r"Times of the trace: [/] \x1b[31m." in said
    assert "[blue]" in said
