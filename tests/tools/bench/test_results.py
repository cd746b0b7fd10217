"""Figures of a run from blocks of known times."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_safusion.tools.bench.results import Turned, summarize
from lightning_safusion.tools.bench.rows import FLOOR

REPORT: dict[str, Any] = {
    "plan": [3, 2],
    "exposed_s": 0.5,
    "select_s": 1.0,
    "decode_s": 0.25,
    "bytes_sent": 600,
    "achieved_density": 0.02,
    "plain_ddp": None,
}


def turned(*steps: float, wire: float | None = None, peak: int = 0) -> Turned:
    """A turn of an engine whose device counts what it sends, or of DDP."""
    return Turned([*steps], peak_bytes=peak, figures=REPORT if wire else {}, wire_bytes=wire)


def test_steps_are_means_over_workers_and_the_first_of_a_block_does_not_count() -> None:
    rounds = [
        [turned(90.0, 4.0, 6.0, wire=100.0, peak=7), turned(90.0, 6.0, 8.0, wire=300.0, peak=9)],
        [turned(90.0, 9.0, 9.0, wire=100.0, peak=8), turned(90.0, 11.0, 9.0, wire=100.0, peak=8)],
    ]
    blocks = {
        FLOOR: [[turned(50.0, 2.0, 2.0)], [turned(50.0, 4.0, 4.0)]],
        "ddp": [[turned(50.0, 16.0)]],
        "safusion": rounds,
    }
    floor, ddp, row = summarize(blocks)
    assert (floor.step_s, floor.over_floor, floor.exposed_s) == (3.0, 1.0, 0.0)
    assert (ddp.step_s, ddp.bytes_sent, ddp.select_s, ddp.density) == (16.0, None, None, None)
    # steps of 5, 7, 10 and 9 seconds
    assert row.step_s == 8.0
    assert (row.low_s, row.high_s) == (6.5, 9.25)
    assert row.over_floor == pytest.approx(8 / 3)
    assert row.over_ddp == 0.5
    assert row.exposed_s == pytest.approx(8.0 - 3.0 - 1.25)
    assert (row.awaited_s, row.select_s, row.decode_s) == (0.5, 1.0, 0.25)
    assert (row.bytes_sent, row.wire_bytes, row.peak_bytes) == (600, 100.0, 9)
    assert (row.density, row.buffers, row.plain_ddp) == (0.02, 2, None)


def test_only_a_system_with_an_engine_can_have_left_it_to_ddp() -> None:
    def row(system: str) -> Turned:
        return Turned([9.0, 2.0], figures=dict.fromkeys(REPORT) | {"system": system, "plain_ddp": "a reason"})

    names = ("ddp", "ddp-bf16", "saf-pooled", "hsdp-bf16", "saf-hsdp")  # the last two of a user's sharded model
    rows = summarize({name: [[row(name)]] for name in names})
    assert [each.by_ddp for each in rows] == [False, False, True, False, True]


def test_what_takes_no_longer_than_the_floor_has_nothing_exposed() -> None:
    blocks = {FLOOR: [[turned(9.0, 2.0)]], "ddp": [[turned(9.0, 1.5)]]}
    assert [row.exposed_s for row in summarize(blocks)] == [0.0, 0.0]
