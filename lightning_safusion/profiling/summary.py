"""The file ``overlap.json`` of a run: plain numbers for reports.

Written by rank 0. Keys (seconds end in ``_s``; numbers that do not exist, as those of the exchange with plain DDP, are
left out or null):

- ``version``: 1; ``run``: when the fit began, in seconds since 1970, which all files of a fit have in common.
- ``system``, ``world_size``, ``device``, ``plain_ddp`` (why plain DDP is used; null if it is not), ``versions`` (by
  package), ``settings`` (of the strategy, as text; see ``EngineSettings.describe``), ``profiler`` (its own settings).
- ``command``: how the process was started (``sys.argv``).
- ``density``: asked for in the latest step; null with plain DDP.
- ``steps``: rows of rank 0, one per recorded step, the last 1000: ``step``, and the numbers of ``StepFigures``.
- ``ranks``: by rank, means of ``StepFigures`` over the latest round of recorded steps; ``mean``: the mean over ranks.
- ``slowest_rank``: the rank whose own work takes longest; ``skew_s``: by how much it exceeds the median rank's.
- ``buffers``: rows of :func:`~lightning_safusion.profiling.figures.buffer_means` of rank 0.
- ``plan``: ``[number of tensors, collective]`` of each buffer, null if there is none; ``costs``: the agreed numbers
  that it was made from (``GroupCosts``), null with plain DDP.
- ``decisions``: the latest decisions on the buffers' sizes, oldest first, see
  :class:`~lightning_safusion.fusion.replan.Decision`.
- ``timeline``: the latest recorded step of rank 0, see ``StepTimeline.from_dict``.
- ``clocks``: ``offset_s`` and ``error_s`` of each rank's clock against rank 0's.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch

from lightning_safusion.__about__ import __version__
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.profiling.figures import RankFigures, StepFigures, buffer_means
from lightning_safusion.profiling.timeline import StepTimeline

FILE = "overlap.json"


def summarize(
    figures: RankFigures,
    rows: Sequence[tuple[int, StepFigures]],
    steps: Sequence[StepTimeline],
    plan: Plan | None,
    costs: GroupCosts | None,
    clocks: tuple[np.ndarray, np.ndarray],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of the file.

    Args:
        figures: Of all ranks, in the latest round.
        rows: Numbers and figures of the recorded steps.
        steps: The latest round.
        plan: In use.
        costs: What it was made from.
        clocks: Offsets and errors of :func:`~lightning_safusion.profiling.hosts.clock_offsets`.
        about: ``run``, ``system``, ``world_size``, ``device``, ``plain_ddp``, ``settings``, ``profiler``, ``density``
            and ``decisions``.
    """
    rank, skew = figures.slowest
    versions = {"lightning_safusion": __version__, "lightning": lightning.__version__, "torch": torch.__version__}
    content = {
        "version": 1,
        **about,
        "versions": versions,
        "command": shlex.join(sys.argv),
        "steps": [{"step": step, **row.as_dict()} for step, row in rows],
        "ranks": [each.as_dict() for each in figures.ranks],
        "mean": figures.mean.as_dict(),
        "slowest_rank": rank,
        "skew_s": skew,
        "buffers": buffer_means(steps),
        "plan": None if plan is None else [[g.stop - g.start, g.collective] for g in plan.groups],
        "costs": None if costs is None else asdict(costs),
        "timeline": steps[-1].to_dict() if steps else None,
        "clocks": {"offset_s": clocks[0].tolist(), "error_s": clocks[1].tolist()},
    }
    plain: dict[str, Any] = _without_nan(content)
    return plain


def write_summary(folder: Path, content: Mapping[str, Any]) -> Path:
    """Writes the file into an existing directory, and returns its path."""
    path = folder / FILE
    path.write_text(json.dumps(content, allow_nan=False, indent=1))
    return path


def load_timeline(run_dir: Path) -> StepTimeline:
    """The step of rank 0 that a run's file holds, for example to draw it.

    Raises:
        ValueError: If there is no such file, or no step in it.
    """
    path = run_dir / FILE
    if not path.exists():
        raise ValueError(f"no {FILE} in {run_dir}: OverlapProfiler writes it at the end of a fit")
    timeline = json.loads(path.read_text())["timeline"]
    if timeline is None:
        raise ValueError(f"{path} holds no step: none was recorded")
    return StepTimeline.from_dict(timeline)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
