"""What is said by simulation of a measured row: with its options, or nothing where the simulator does not know them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_safusion.tools.bench.forecast import Recorded, simulated_as, turning_point
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.tools.plan.test_calibration import ON_DEVICES

RECORDED = Recorded(resolve_trace("lstm"), replace(ON_DEVICES, device="a100"))


@pytest.mark.parametrize(
    ("row", "simulated"),
    [
        ("ddp-bf16", "ddp-bf16"),
        ("saf-pooled[density=0.1]", "saf-pooled"),
        ("saf-pooled[wire=q2,density=0.1]", "saf-pooled[wire=q2]"),
        ("saf-pooled[memory=none]", "saf-pooled[wire=auto]"),
        ("saf-pooled[memory=residual[decay=0.9],collective=allgather]", "saf-pooled[collective=allgather,wire=q4]"),
        ("saf-pooled[dense=*.bias]", None),
        ("safusion[offload=true]", None),
        ("behind[fusion=aligned[tensors_per_buffer=3]]", None),
    ],
)
def test_a_measured_row_is_simulated_with_its_options(row: str, simulated: str | None) -> None:
    assert parse_row(row).name == row
    assert simulated_as(row) == simulated


def test_options_move_the_bandwidth_at_which_the_answer_changes() -> None:
    rates = [turning_point(RECORDED, f"saf-pooled[wire={wire}]", 0.1, "ddp")[0] or 0.0 for wire in ("q4", "fp32")]
    assert rates[0] > 1.02 * rates[1] > 0
