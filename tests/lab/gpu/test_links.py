"""The set `links`: which rows come first, and that every system trains behind the link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lab.gpu.figures import Lines
from lab.gpu.links import KNOWN, PAPERS, RATES, cells, goals
from lab.gpu.networks import WORKLOADS, Network
from lightning_safusion.systems.rows import SYSTEMS
from tests.packaging.environments import ROOT, run


def test_every_row_comes_once_and_the_goals_come_first() -> None:
    every = list(cells())
    assert len(set(every)) == len(every) == len(WORKLOADS) * len(RATES) * len((*KNOWN, *PAPERS))
    assert every[:8] == [(model, 10, system) for model in ("bert-large", "gpt2-large") for system in KNOWN]
    assert set(KNOWN + PAPERS) <= SYSTEMS.keys()


def test_the_default_is_compared_with_the_best_of_what_people_have() -> None:
    speeds = [12.0, 4.0, 8.0, 6.0]
    found = {("a", 10, system): speed for system, speed in zip(KNOWN, speeds, strict=True)}
    (figure,) = goals("a", 10, found)
    assert (figure.value, figure.holds) == (1.5, True)
    del found["a", 10, KNOWN[1]]
    assert list(goals("a", 10, found)) == []


@pytest.mark.slow
def test_a_rehearsal_trains_every_system(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "links.jsonl")
    stage = ["lab.gpu.stage", "lab.gpu.links:links", lines.path, "--rehearse"]
    run(sys.executable, "-m", *stage, cwd=ROOT)
    names = [figure.name for figure in lines.read()]
    assert sum(name.startswith("emulated link") for name in names) == len(RATES)
    for system in ("default", *KNOWN[1:], *PAPERS):
        assert f"perceptron, 100 Gbit/s, {system}: throughput" in names
    assert not [name for name in names if name.endswith("failed")]


@pytest.mark.parametrize("name", [name for name, work in WORKLOADS.items() if work.module == "transformers"])
def test_networks_of_transformers_have_a_loss(name: str) -> None:
    pytest.importorskip("transformers")
    assert Network(name, small=True).training_step(torch.empty(0), 0).isfinite()
