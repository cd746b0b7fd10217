"""The example that users copy runs as they would run it under a launcher; tests/packaging runs it alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion import build
from tests.process_group import run_script

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
CHEAP, DEAR = LinearCost(1e-6, 1e-12), LinearCost(1.0, 1.0)


def sent(printed: str) -> tuple[int, int] | None:
    """Bytes per step, and those of DDP; None where plain DDP has taken over. The loss has fallen in both cases."""
    loss = re.search(r"^loss ([\d.]+)$", printed, re.MULTILINE)
    assert loss, printed
    assert float(loss[1]) < 0.1  # the target's variance is about 0.6
    found = re.search(r"^sent ([\d,]+) bytes per step where DDP sends ([\d,]+)$", printed, re.MULTILINE)
    assert (found is None) == ("plain DDP took over" in printed), printed
    return None if found is None else (int(found[1].replace(",", "")), int(found[2].replace(",", "")))


@pytest.mark.slow
@pytest.mark.parametrize("sparse_pays", [True, False])
def test_quickstart_on_two_kinds_of_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse_pays: bool) -> None:
    sparse, dense = (CHEAP, DEAR) if sparse_pays else (DEAR, CHEAP)
    monkeypatch.setattr(build, "calibrate", lambda transport, device: {"allgather": sparse, "allreduce": dense})
    first, second = run_script(QUICKSTART, tmp_path)
    assert "loss" not in second
    nbytes = sent(first)
    assert (nbytes is not None) == sparse_pays
    if nbytes is not None:
        assert 0 < nbytes[0] < 0.2 * nbytes[1]
