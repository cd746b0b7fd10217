"""The notebook has no outputs, and its cells run as in a kernel: one process that forks its workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.documents.pages import ROOT
from tests.packaging.environments import run

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
#: A kernel is interactive, has threads beside the one that runs cells, and cells are its ``__main__``.
KERNEL = """
import json, sys, threading
sys.ps1 = "In: "
threading.Thread(target=threading.Event().wait, daemon=True).start()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "cell", "exec"), globals())
drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
of = {key: column(sparse, f"safusion/{key}")[1] for key in ("sent_mb", "dense_mb")}
print(json.dumps([drawn, of["sent_mb"][-1], of["dense_mb"][-1], column(dense, "safusion/sent_mb")[1]]))
"""


def cells() -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])


def test_it_is_small_without_outputs_and_its_links_lead_somewhere() -> None:
    assert NOTEBOOK.stat().st_size < 10_000
    assert {(str(cell["outputs"]), cell["execution_count"]) for cell in cells() if "outputs" in cell} == {("[]", None)}
    text = "".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "markdown")
    links = [part.partition(")")[0].partition("#")[0] for part in text.split("](")[1:]]
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_its_cells_run_as_in_a_kernel(tmp_path: Path) -> None:
    threads = {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    all_of_them = "timeout", "--signal=KILL", "400"  # workers too
    printed = run(*all_of_them, sys.executable, "-c", KERNEL, NOTEBOOK, cwd=tmp_path, **threads)
    drawn, sent, gradients, plain = json.loads(printed.splitlines()[-1])
    assert list(drawn) == ["DDP", "SAFusion"]
    ends = [fmean(losses[-15:]) for losses in drawn.values()]
    assert all(end < 0.7 * fmean(losses[:5]) for end, losses in zip(ends, drawn.values(), strict=True))
    assert ends[0] == pytest.approx(ends[1], rel=0.15)
    assert sent < 0.02 * gradients
    assert not plain
    assert "density 0.020" in printed
