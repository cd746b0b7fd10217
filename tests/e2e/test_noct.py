"""What the profiler calls exposed is what a step pays for the exchange: over a link of known rate, on and off."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from lab.bench.links import linked_namespaces
from tests.e2e.noct import BLOCK, is_on
from tests.e2e.processes import ROOT, need, on_two_machines

pytestmark = pytest.mark.slow


def test_exposed_exchange_is_what_a_step_takes_longer_with_it(tmp_path: Path) -> None:
    need("ip", "tc")
    script = ROOT / "tests" / "e2e" / "noct.py"
    with linked_namespaces(2, rate="15mbit") as machines:
        on_two_machines(machines, tmp_path, 150, script, "--folder", tmp_path)
    rows = json.loads((tmp_path / "overlap.json").read_text())["steps"]
    rows = [row for row in rows if row["step"] >= 2 * BLOCK and row["step"] % BLOCK > 1]  # settled
    on, off = ([row for row in rows if is_on(row["step"]) is state] for state in (True, False))
    # Lightning's own message between batches waits for the worker whose link is behind: that is no part of an exchange.
    with_exchange, without = (median(row["step_s"] - row["data_s"] for row in chosen) for chosen in (on, off))
    exposed = median(row["exposed_s"] for row in on)
    difference = with_exchange - without
    print(f"step {with_exchange * 1e3:.1f} ms, without exchange {without * 1e3:.1f}, exposed {exposed * 1e3:.1f}")
    assert difference >= 0.3 * with_exchange
    assert exposed == pytest.approx(difference, rel=0.1, abs=5e-3)
    assert median(row["exposed_s"] for row in off) < 1e-3
