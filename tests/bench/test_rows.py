"""Rows with options: how they are read, what is refused, and that strategies get what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_safusion.bench.rows import parse_row, refuse_training_options, split_rows
from lightning_safusion.bench.run import run_bench
from lightning_safusion.bench.session import Rhythm
from lightning_safusion.bench.workers import Task


def test_commas_in_brackets_do_not_separate_rows() -> None:
    rows = split_rows("ddp, saf-pooled[wire=q4, density=0.25],omgs,ddp")
    assert rows == ["ddp", "saf-pooled[wire=q4,density=0.25]", "omgs"]


@pytest.mark.parametrize("text", ["ddp[wire=q4", "ddp]", "ddp,,omgs", "omgs[wire=q4]x", "[wire=q4]"])
def test_what_is_no_list_of_rows_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rows are written as in"):
        split_rows(text)


def test_a_strategy_gets_the_options_of_its_row() -> None:
    row = parse_row("saf-pooled[wire=q4,density=0.25,dense=*.bias|head.*,dense_below=7,lr=0.5,momentum=0]")
    assert row.system == "saf-pooled"
    assert dict(row.training) == {"lr": 0.5, "momentum": 0.0}
    strategy = row.strategy(0.01)
    assert strategy.settings.wire == "q4"
    assert strategy.settings.quota == "pooled"
    assert strategy.settings.density(0, 0) == 0.25
    assert strategy.dense_rules[:2] == (["*.bias", "head.*"], 7)
    assert parse_row("ssfusion[offload=false]").strategy(0.02).settings.offload is False
    assert parse_row("ssfusion").strategy(0.02).settings.density(0, 0) == 0.02
    assert Task(density=0.5).strategy("wfbp[density=0.1]").settings.density(0, 0) == 0.1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("saf-poled", "Did you mean 'saf-pooled'"),
        ("omgs[dencity=0.1]", "'omgs\\[dencity=0.1\\]': unknown option 'dencity'.*Did you mean 'density'"),
        ("omgs[transport=horovod]", "unknown option 'transport'"),
        ("omgs[density=much]", "density is a number, got 'much'"),
        ("omgs[density=2]", "'omgs\\[density=2\\]': density must be in"),
        ("omgs[dense_below=-1]", "dense_below is a whole number, got '-1'"),
        ("omgs[offload=1]", "offload is true or false, got '1'"),
        ("omgs[wire=q9]", "unknown wire format 'q9'"),
        ("omgs[quota=pooled]", "scope='group' has none of"),
        ("omgs[density]", "got 'density'"),
        ("omgs[]", "options are written as in"),
        ("omgs[density=0.1,density=0.2]", "density is given twice"),
        ("omgs[lr=fast]", "lr is a number, got 'fast'"),
        ("ddp[wire=q4]", "it has no wire"),
        ("ddp-bf16[density=0.1]", "has no density"),
    ],
)
def test_unknown_options_and_values_are_named(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_row(row)


def test_training_options_need_a_training(tmp_path: Path) -> None:
    refuse_training_options(["ddp", "omgs[density=0.1]"])
    with pytest.raises(ValueError, match="'omgs\\[lr=0.1,momentum=0\\]': lr, momentum changes a training"):
        run_bench("ddp,omgs[lr=0.1,momentum=0]", output=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_to_accuracy": "digits"}, "unknown task 'digits'"),
        ({"time_to_accuracy": "digits-resnet", "model": "lstm"}, "model=lstm has no meaning with time_to_accuracy"),
        ({"time_to_accuracy": "digits-resnet", "seed": 1}, "seed=1 has no meaning"),
        ({"time_to_accuracy": "digits-resnet", "seeds": "a"}, "seeds are written as in '0,1,2'"),
        ({"time_to_accuracy": "digits-resnet", "density": "0.1,0.2"}, "takes one density"),
        ({"time_to_accuracy": "digits-resnet", "workers": 3}, "64 samples per step of digits-resnet cannot be shared"),
        ({"time_to_accuracy": "digits-resnet", "systems": "easgd"}, "'easgd' cannot be told: workers hold different"),
        ({"time_to_accuracy": "digits-resnet", "systems": "saf-naive"}, "each step's timing"),
        ({"time_to_accuracy": "digits-resnet", "systems": "omgs[fusion=horovod]"}, "scope='tensor'"),
        ({"time_to_accuracy": "digits-resnet", "systems": "wfbp[collective=hierarchical]"}, "have no nodes"),
        ({"time_to_accuracy": "digits-resnet", "systems": "wfbp[beta2=0.9]"}, "SGD, which has no beta2"),
        ({"seeds": "1"}, "seeds=1 has no meaning without time_to_accuracy"),
    ],
)
def test_what_a_mode_cannot_honour_is_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_bench(output=tmp_path, **options)  # type: ignore[arg-type]  # options of several types


def test_hooks_of_ddp_need_little_warmup_with_or_without_options() -> None:
    assert Rhythm(warmup=30).warmup_of("powersgd-rank4[lr=0.1]") == 12
    assert Rhythm(warmup=30).warmup_of("saf-pooled[wire=q4]") == 30
