"""Run directories as the callbacks write them, with made-up times."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import torch

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.fusion.slowest import SlowWorker, WorkerTimes
from lightning_safusion.metrics.figures import TensorFigures
from lightning_safusion.metrics.history import MissingRateStatistics
from lightning_safusion.profiling.figures import RankFigures, StepFigures, buffer_means
from lightning_safusion.profiling.overlap_file import Overlap
from lightning_safusion.profiling.timeline import Phase, StepTimeline, WindowTimeline
from tests.profiling.steps import buffer

RUN = 1.7e9 + 1 / 3
NASTY = '<b onclick="x">&amp;\'</b>'
DECISIONS = (
    Decision(10, "switch", 2, 1, 0.25, None, 0.04),
    Decision(16, "keep", 2, 1, 0.25, 0.2, 0.032),
    Decision(20, "stay", 2, 3, 0.001, None, 0.032),
)

WORKERS = WorkerTimes(20, 0.1, (0.06, 0.09), (0.04, 0.01))
SLOW = SlowWorker(1, "node7", 0.03, 0.1, 12)


def step(number: int, buffers: int = 2, names: tuple[str, ...] = ("head.weight", NASTY)) -> StepTimeline:
    """100 ms: forward 30, backward 60 with buffers in it, optimizer 10; 5 ms exposed for the last buffer."""
    at = float(number)
    made = []
    for place in range(buffers):
        closed = at + 0.04 + 0.03 * place / max(1, buffers - 1)
        exposed = 0.005 if place == buffers - 1 else 0.0
        finished = at + 0.085 if exposed else closed + 0.008
        moments = (closed, closed + 0.002, finished, at + 0.085 - exposed, at + 0.085, at + 0.086)
        known = buffer(place * len(names), len(names), moments, bytes_sent=60, bytes_received=120)
        own = tuple(f"{place}.{name}" if buffers > 2 else name for name in names) if place else names
        made.append(replace(known, tensors=own, ready=(closed - 0.01, nan)))
    phases = (
        Phase("forward", at, at + 0.03),
        Phase("backward", at + 0.03, at + 0.09),
        Phase("optimizer", at + 0.09, at + 0.1),
    )
    return StepTimeline(number, at, at + 0.1, phases, (WindowTimeline(tuple(made), at + 0.089, False),))


def overlap(buffers: int = 2, aside: str | None = None) -> dict[str, Any]:
    """The content of ``overlap.json`` as OverlapProfiler makes it."""
    steps = [step(number, buffers) for number in (7, 8)]
    if aside is not None:
        steps = [StepTimeline(each.step, each.begin, each.end, each.phases, ()) for each in steps]
    figures = [StepFigures.of(each) for each in steps]
    count = 2 * buffers
    costs = GroupCosts(
        (500,) * count,
        tuple(0.04 + 0.01 * place for place in range(count)),
        (30.0,) * count,
        (2000.0,) * count,
        2,
        sparse=(1e-3, 1e-5),
        dense=(1e-3, 1e-5),
    )
    return Overlap(
        run=RUN,
        system="safusion",
        world_size=2,
        device="cpu",
        plain_ddp=aside,
        density=None if aside else 0.05,
        settings={"compressor": "TopK()", "fusion": "Aligned(2)"},
        profiler={"every_n_steps": 50, "record_steps": 2},
        versions={"lightning_safusion": "0.1", "lightning": "2.6.6", "torch": "2.13.0"},
        command="train.py fit --data 'my data'",
        steps={each.step: row for each, row in zip(steps, figures, strict=True)},
        ranks=RankFigures((StepFigures.mean(figures),) * 2),
        buffers=tuple(buffer_means(steps)),
        plan=None if aside else Plan.from_stops(range(2, 2 * buffers + 1, 2)),
        costs=None if aside else costs,
        timeline=steps[-1],
        decisions=() if aside else DECISIONS,
        workers=None if aside else WORKERS,
        slow_worker=None if aside else SLOW,
        clocks={"offset_s": [0.0, 0.0], "error_s": [0.0, 0.0]},
    ).to_dict()


def missing(tensors: int = 3, samples: int = 4) -> dict[str, Any]:
    """The content of ``missing_rate.json``: of two ranks, one sends nothing of the last tensor in every other step."""
    names = [f"layer{place}.weight" for place in range(tensors - 1)] + [NASTY]
    statistics = MissingRateStatistics(names)
    for sample in range(samples):
        sums = torch.zeros(6, tensors, dtype=torch.float64)
        sums[0], sums[2], sums[3], sums[4], sums[5] = 2, 200, 10, 8.0, 4.0
        sums[1, -1] = sample % 2
        statistics.add(10 * (sample + 1), TensorFigures(tuple(names), sums))
    return statistics.summary() | {"run": RUN}


def write_run(folder: Path, content: dict[str, Any] | None = None, absent: dict[str, Any] | None = None) -> Path:
    """Writes a run directory and returns it; ``absent`` is the content of ``missing_rate.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(overlap() if content is None else content, allow_nan=False, indent=1)
    (folder / "overlap.json").write_text(text)
    if absent is not None:
        (folder / "missing_rate.json").write_text(json.dumps(absent))
    return folder
