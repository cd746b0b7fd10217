"""The table of models that are sharded inside of machines; a short run over links."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from lab import hsdp
from lab.attack.workers import End
from lab.bench.links import why_no_links
from tests.process_group import run_alone


def test_rows_are_compared_with_each_other() -> None:
    seconds = {"floor": 0.1, "hsdp": 0.6, "hsdp-bf16": 0.3, "saf-hsdp": 0.12}
    told = {"steps": {row: [(9.0, 1e9), (each, 1e6 * each), (each, 1e6 * each)] for row, each in seconds.items()}}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(hsdp.table([End(rank, 0, 1.0, told) for rank in range(4)]))
    text = re.sub(" +", " ", console.export_text())
    assert "| saf-hsdp | 120 | 1.20 | 5.00 | 2.50 | 120 |" in text
    assert "| floor | 100 | 1.00 | 6.00 | 3.00 | 100 |" in text


@pytest.mark.slow
@pytest.mark.skipif(why_no_links() is not None, reason=f"links: {why_no_links()}")
def test_a_short_run_counts_what_goes_between_machines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_alone(lambda: hsdp.hsdp("100mbit", rounds=1, block=2, warmup=20, output=tmp_path), timeout=200)
    rows = dict(re.findall(r"\| ([\w-]+) .*\| +([\d,]+) \|$", capfd.readouterr().out, re.MULTILINE))
    sent = {row: int(kilobytes.replace(",", "")) for row, kilobytes in rows.items()}
    assert sent["floor"] < 20
    assert 13_000 < sent["hsdp"] < 16_000
    assert sent["saf-hsdp"] < 1.1 * sent["hsdp"]  # dense, if this machine is too busy for its link to matter
