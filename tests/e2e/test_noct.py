"""What the profiler calls exposed is what a step pays for the exchange: over a link of known rate, on and off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest

from lab.bench.links import Namespace, linked_namespaces
from tests.e2e.noct import BLOCK, is_on
from tests.e2e.processes import ROOT, environment, need, started

pytestmark = pytest.mark.slow


def _command(machine: Namespace, node_rank: int, main: Namespace, folder: Path) -> list[str | Path]:
    rendezvous = ["--master-addr", main.address, "--master-port", "29500"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
    script = ROOT / "tests" / "e2e" / "noct.py"
    return ["ip", "netns", "exec", machine.name, *torchrun, "--node-rank", str(node_rank), script, "--folder", folder]


def test_exposed_exchange_is_what_a_step_takes_longer_with_it(tmp_path: Path) -> None:
    need("ip", "tc")
    env = environment(GLOO_SOCKET_IFNAME="eth0")
    with (
        linked_namespaces(2, rate="15mbit") as (main, other),
        started(_command(main, 0, main, tmp_path), tmp_path / "output0", env) as first,
        started(_command(other, 1, main, tmp_path), tmp_path / "output1", env) as second,
    ):
        first.finish(150)
        second.finish(20)
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
