"""Losses of sharded models: the table; what is refused; the dense row trains as one worker with all samples does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.convergence.scheme import Scheme
from lab.convergence.training import train
from lab.hsdp_loss import Trained, hsdp_loss, table
from lab.processes import Ledger
from lab.tasks import parse_task
from tests.process_group import run_alone


def test_losses_are_compared_seed_by_seed() -> None:
    dense, sparse = ([Trained(each, sent, sent / 2, 4000, 1.0) for each in (2.0, 4.0)] for sent in (0, 100))
    sparse[1] = Trained(4.2, 300, 150, 4000, 1.0)
    results = {
        (row, seed): one for row, both in (("hsdp", dense), ("saf-hsdp", sparse)) for seed, one in enumerate(both)
    }
    lines = table(results, ["hsdp", "saf-hsdp"], [0, 1]).splitlines()
    assert lines[-1] == "| saf-hsdp | 2.0000 | 4.2000 | +0.00 | +5.00 | +2.50 | 20 | 40 |"
    assert lines[-2].startswith("| hsdp | 2.0000 | 4.0000 |  |")


@pytest.mark.parametrize(
    ("task", "rows", "said"),
    [
        ("digits-vit", ["saf-hsdp"], "has no loss for its metric"),
        ("headers-transformer[accumulate=2,ema=0.9]", ["saf-hsdp"], "is trained with accumulate, ema"),
        ("headers-transformer", ["saf"], "'saf'"),
    ],
)
def test_what_is_refused(task: str, rows: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        hsdp_loss(task, rows=rows, output=tmp_path)


@pytest.mark.slow
def test_the_dense_row_trains_as_one_worker_with_all_samples(tmp_path: Path) -> None:
    task = parse_task("headers-transformer[steps=2]")
    run_alone(lambda: hsdp_loss(task.name, [3], ["saf-hsdp", "saf-ddp-4"], output=tmp_path), timeout=200)
    done = {}
    ledger = Ledger(tmp_path / "results.jsonl", Trained, "a finished training")
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        settings = json.loads(line)["settings"]
        done[settings["row"]] = ledger.get(settings)
    dense, sharded, replicated = (done[row] for row in ("hsdp", "saf-hsdp", "saf-ddp-4"))
    assert dense.metric == pytest.approx(train(task, Scheme("dense"), 3).metric, rel=1e-5)
    for each in (sharded, replicated):
        assert each.metric != pytest.approx(dense.metric, rel=1e-5)
        assert 0 < each.bytes_mean < 0.5 * each.dense_bytes
    assert sharded.bytes_mean == pytest.approx(replicated.bytes_mean, rel=0.1)
