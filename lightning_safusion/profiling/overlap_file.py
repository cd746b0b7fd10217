"""The file ``overlap.json`` of a run: rank 0 of OverlapProfiler writes it, reports read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.fusion.slowest import SlowWorker, WorkerTimes
from lightning_safusion.profiling.figures import BufferRow, RankFigures, StepFigures
from lightning_safusion.profiling.timeline import StepTimeline, from_row, without_nan

FILE = "overlap.json"
VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Overlap:
    """What the profiler has measured of a run. The fields are the keys of the file; seconds end in ``_s``.

    The file also has ``version`` and, computed from ``ranks``, ``mean`` (over ranks), ``slowest_rank`` and ``skew_s``
    (its own work, less that of the median rank). Numbers that do not exist, as those of the exchange with plain DDP,
    are left out or null.
    """

    run: float  # when the fit began, in seconds since 1970; the same in all files of a fit
    system: str
    world_size: int
    device: str  # its type
    plain_ddp: str | None  # why plain DDP was used; None if it was not
    density: float | None  # density asked for in the latest step; None with plain DDP
    settings: dict[str, str]  # of the strategy, as text
    profiler: dict[str, Any]  # settings of the profiler
    versions: dict[str, str]  # by package
    command: str  # how the process was started (``sys.argv``)
    steps: dict[int, StepFigures]  # the last 1000 recorded steps of rank 0, by number
    ranks: RankFigures  # means of every rank over the latest round of recorded steps
    buffers: tuple[BufferRow, ...]  # of rank 0, in launch order
    plan: Plan | None  # in use at the end; in the file ``[number of tensors, collective]`` of each buffer
    costs: GroupCosts | None  # the agreed costs from which it was made; None with plain DDP
    timeline: StepTimeline | None  # the latest recorded step of rank 0
    decisions: tuple[Decision, ...]  # the latest decisions on the buffers' sizes, oldest first
    workers: WorkerTimes | None  # of all ranks, by the planner's latest review; None before it, and with plain DDP
    slow_worker: SlowWorker | None  # the one that others wait for, by its reviews
    clocks: dict[str, list[float]]  # ``offset_s`` and ``error_s`` of each rank's clock against rank 0's

    def to_dict(self) -> dict[str, Any]:
        """The content of the file: plain values, null for NaN."""
        known = self.ranks.as_dict()
        content = {"version": VERSION, **asdict(self)} | {
            "steps": [{"step": number, **row.as_dict()} for number, row in self.steps.items()],
            "ranks": [each.as_dict() for each in self.ranks.ranks],
            "mean": self.ranks.mean.as_dict(),
            "slowest_rank": known.get("slowest_rank"),
            "skew_s": known.get("skew_s"),
            "plan": None if self.plan is None else [[g.stop - g.start, g.collective] for g in self.plan.groups],
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
        }
        return without_nan(content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Overlap:
        """The content of a file, as :meth:`to_dict` has made it; see :func:`read_file`."""
        costs, plan, timeline = content["costs"], content["plan"], content["timeline"]
        workers, slow = content["workers"], content["slow_worker"]
        values = {each.name: content[each.name] for each in fields(cls)} | {
            "run": float(content["run"]),
            "settings": dict(content["settings"]),
            "profiler": dict(content["profiler"]),
            "versions": dict(content["versions"]),
            "steps": {int(row["step"]): from_row(StepFigures, row, gaps=True) for row in content["steps"]},
            "ranks": RankFigures(tuple(from_row(StepFigures, row, gaps=True) for row in content["ranks"])),
            "buffers": tuple(from_row(BufferRow, row) for row in content["buffers"]),
            "plan": None if plan is None else Plan.from_list(plan),
            "costs": None if costs is None else from_row(GroupCosts, costs),
            "timeline": None if timeline is None else StepTimeline.from_dict(timeline),
            "decisions": tuple(from_row(Decision, row) for row in content["decisions"]),
            "workers": None if workers is None else from_row(WorkerTimes, workers),
            "slow_worker": None if slow is None else from_row(SlowWorker, slow),
        }
        return cls(**values)


def read_file(path: Path, parse: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    """The content of one of a run's files; None if there is no such file.

    Raises:
        ValueError: If it is damaged; the message names the file and the entry.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"it has version {content['version']}, and this package reads version {VERSION}")
        return parse(content)
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise ValueError(f"{path} has no entry {error.args[0]!r}: write it again with this version") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def load_overlap(run_dir: Path) -> Overlap:
    """The content of a run's ``overlap.json``; a ValueError says that there is none, or what is damaged."""
    overlap = read_file(run_dir / FILE, Overlap.from_dict)
    if overlap is None:
        raise ValueError(f"no {FILE} in {run_dir}: OverlapProfiler writes it at the end of a fit")
    return overlap


def load_timeline(run_dir: Path) -> StepTimeline:
    """The step of rank 0 in a run's ``overlap.json``, for example to draw it.

    Raises:
        ValueError: If there is no such file, no step in it, or it is damaged.
    """
    step = load_overlap(run_dir).timeline
    if step is None:
        raise ValueError(f"{run_dir / FILE} holds no step: none was recorded")
    return step
