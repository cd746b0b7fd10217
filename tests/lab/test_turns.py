"""A benchmark of rows in turns beside each row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.turns import Figures, report, turns
from lightning_safusion.tools.bench.rows import FLOOR
from tests.process_group import run_alone

TINY: dict[str, Any] = {"size": "tiny", "batch_size": 2, "bandwidth": None, "repeats": 1, "rounds": 1, "warmup": 3}


def figures(over_floor: float, over_ddp: float, step_s: float = 0.1) -> Figures:
    return {FLOOR: {"step_s": step_s}, "a": {"over_floor": over_floor, "over_ddp": over_ddp}}


def test_medians_are_compared_and_their_spread_is_shown() -> None:
    together = [figures(1.0, 0.5), figures(1.2, 0.6, 0.2), figures(1.3, 0.8)]
    alone = {"a": [figures(1.25, 0.5), figures(1.0, 0.5), figures(1.3, 0.5)]}
    shown = report(["a"], together, alone)
    first = "| `a` | the floor | 1.200 (1.000 to 1.300) | 1.250 (1.000 to 1.300) | -4.0 % | +0.0 (-20.0 to +20.0) |"
    assert first in shown
    assert "| `a` | DDP | 0.600 (0.500 to 0.800) | 0.500 (0.500 to 0.500) | +20.0 % | +20.0 (+0.0 to +60.0) |" in shown
    assert "1 of 2 medians of 3 repeats differ by 5% or less" in shown
    assert shown.endswith("took 100 (100 to 200) ms")


@pytest.mark.slow
def test_rows_are_measured_in_turns_and_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = {"paced": "lstm", "scale": 0.0005}
    rows = ["ddp-bf16", "saf-inter[density=0.1]"]
    run_alone(lambda: turns(rows, output=tmp_path, **TINY | job), timeout=180)
    runs = {path.parent.name: path for path in tmp_path.glob("*/bench.json")}
    assert set(runs) == {"1-in-turns", *(f"1-{row}" for row in rows)}
    shown = capfd.readouterr().out
    assert "2 workers, loopback" in shown
    assert [line.split(" | ")[0] for line in shown.splitlines() if line.startswith("| `")] == 2 * [
        f"| `{row}`" for row in rows
    ]
    assert "of 4 medians of 1 repeats" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"systems": ["ddp"]}, "give rows besides no-exchange, barrier, ddp"),
        ({"systems": ["saffusion"]}, "unknown system 'saffusion'"),
        ({"repeats": 0}, "1 repeat or more"),
        ({"model": "mlp"}, "unknown model 'mlp'"),
        ({"paced": "bert"}, "unknown trace 'bert'"),
        ({"rounds": 0}, "needs 1 round"),
        ({"bandwidth": "fast"}, "the rate of a link is written as"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(
    tmp_path: Path, options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        turns(output=tmp_path, **TINY | options)
    assert not capfd.readouterr().out
