"""Rows with options: how they are read, what is refused, and that strategies get what was written."""

from __future__ import annotations

import pytest

from lightning_safusion.fusion.plans.policy import Aligned
from lightning_safusion.sparsify import ResidualMemory
from lightning_safusion.tools.bench.rows import parse_row


def test_a_strategy_gets_the_options_of_its_row() -> None:
    row = parse_row("saf-pooled[wire=q4,density=0.25,dense=*.bias|head.*,dense_below=7]")
    assert row.system == "saf-pooled"
    strategy = row.strategy(0.01)
    assert strategy.settings.wire == "q4"
    assert strategy.settings.quota == "auto"
    assert strategy.settings.density(0, 0) == 0.25
    assert strategy.dense_rules[:2] == (["*.bias", "head.*"], 7)
    assert parse_row("ssfusion[offload=false]").strategy(0.02).settings.offload is False
    assert parse_row("ssfusion").strategy(0.02).settings.density(0, 0) == 0.02
    assert parse_row("wfbp[density=0.1]").strategy(0.5).settings.density(0, 0) == 0.1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("saf-poled", "Did you mean 'saf-pooled'"),
        ("omgs[dencity=0.1]", "'omgs\\[dencity=0.1\\]': unknown option 'dencity'.*Did you mean 'density'"),
        ("omgs[transport=horovod]", "unknown option 'transport'"),
        ("omgs[density=2]", "'omgs\\[density=2\\]': density must be in"),
        ("omgs[offload=1]", "offload is true or false, got '1'"),
        ("omgs[density]", "got 'density'"),
        ("omgs[]", "options are written as in"),
        ("omgs[density=0.1,density=0.2]", "density is given twice"),
        ("ddp-bf16[density=0.1]", "has no density"),
    ],
)
def test_unknown_options_and_values_are_named(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_row(row)


def test_parts_of_a_row_have_options() -> None:
    memory = parse_row("saf-pooled[memory=residual[decay=0.9],density=0.1]").strategy(0.01).settings.memory
    assert isinstance(memory, ResidualMemory)
    assert memory.decay == 0.9
    fusion = parse_row("behind[fusion=aligned[tensors_per_buffer=3]]").strategy(0.01).settings.fusion
    assert isinstance(fusion, Aligned)
    assert fusion.tensors_per_buffer == 3
    with pytest.raises(ValueError, match="unknown option 'deca'.*Did you mean 'decay'"):
        parse_row("saf-pooled[memory=residual[deca=0.9]]")
