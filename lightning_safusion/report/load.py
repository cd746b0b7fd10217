"""What the callbacks have left in a run directory: the one module that knows the files of a report.

- ``overlap.json`` of :class:`~lightning_safusion.callbacks.OverlapProfiler`, which every report needs (keys:
  :mod:`lightning_safusion.profiling.summary`);
- ``missing_rate.json`` of :class:`~lightning_safusion.callbacks.TensorMissingRateMonitor` (keys:
  :meth:`~lightning_safusion.metrics.history.MissingRateStatistics.summary`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from math import nan
from pathlib import Path
from typing import Any, TypeVar

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.profiling.figures import StepFigures
from lightning_safusion.profiling.timeline import StepTimeline

VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True)
class BufferRow:
    """Means of one buffer over the recorded steps, on rank 0; numbers that were not measured are NaN.

    Args:
        tensors: Names, in ready order.
        collective: ``"allgather"``, ``"allreduce"`` or ``"stream"``.
        elements: Elements of its tensors.
        bytes_sent: Bytes that a rank gave to the collective.
        ready_s: Seconds from the beginning of the backward pass to its last gradient.
        select_s: Seconds of compensation, selection and packing.
        exchange_s: Seconds of the collective.
        exposed_s: Seconds of it for which the backward pass stood still.
        decode_s: Seconds of reading what arrived.
    """

    tensors: tuple[str, ...]
    collective: str
    elements: int
    bytes_sent: int
    ready_s: float
    select_s: float
    exchange_s: float
    exposed_s: float
    decode_s: float


@dataclass(frozen=True, eq=False)
class Overlap:
    """The file ``overlap.json``.

    Args:
        run: When the fit began, which joins its files.
        system: Name of the system.
        world_size: Workers.
        device: Where they compute.
        plain_ddp: Why plain DDP was used; None if it was not.
        density: Density asked for in the latest step; None with plain DDP.
        settings: Of the strategy, as text.
        profiler: Of the profiler.
        versions: By package.
        command: How the run was started.
        steps: Recorded steps of rank 0, by number.
        ranks: Means of every rank over the latest recorded steps.
        mean: The mean over ranks.
        slowest: The rank whose own work takes longest, and seconds by which it exceeds the median rank's.
        buffers: Of rank 0, in launch order.
        plan: In use at the end.
        costs: What it was made from.
        timeline: A step of rank 0.
        decisions: On the buffers' sizes, oldest first.
    """

    run: float
    system: str
    world_size: int
    device: str
    plain_ddp: str | None
    density: float | None
    settings: dict[str, str]
    profiler: dict[str, Any]
    versions: dict[str, str]
    command: str
    steps: dict[int, StepFigures]
    ranks: tuple[StepFigures, ...]
    mean: StepFigures
    slowest: tuple[int, float]
    buffers: tuple[BufferRow, ...]
    plan: Plan | None
    costs: GroupCosts | None
    timeline: StepTimeline | None
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class MissingTensor:
    """One tensor, over all sampled steps and ranks.

    Args:
        name: Of the parameter.
        missing: Share of ranks and steps in which nothing of it was sent.
        everywhere: Share of steps in which no rank sent anything of it.
        density: Share of its elements that was sent.
        error: Share of its energy that stayed behind; None if it always travelled whole.
        rates: Its missing rate by column of the heat map; None where it had no gradient.
    """

    name: str
    missing: float
    everywhere: float
    density: float
    error: float | None
    rates: tuple[float | None, ...]


@dataclass(frozen=True)
class Missing:
    """The file ``missing_rate.json``.

    Args:
        run: When the fit began.
        samples: Steps that were sampled.
        steps: First step of each column of the heat map.
        rate: Missing rate over all tensors.
        tensors: In registration order.
    """

    run: float
    samples: int
    steps: tuple[int, ...]
    rate: float
    tensors: tuple[MissingTensor, ...]


@dataclass(frozen=True)
class Run:
    """Everything that is known of a run.

    Args:
        folder: Where it was found.
        recorded: When its times were written.
        overlap: Times, plan and settings.
        missing: Tensors that went missing; None if that was not sampled in this fit.
        stale: File names of other fits, which are left out.
    """

    folder: Path
    recorded: datetime
    overlap: Overlap
    missing: Missing | None = None
    stale: tuple[str, ...] = ()


def load_run(folder: Path) -> Run:
    """Reads a run directory, or the logger's directory that has it as ``safusion``.

    Raises:
        ValueError: If there is no ``overlap.json``, or a file is damaged; the message names the file and the entry.
    """
    if not (folder / "overlap.json").exists() and (folder / "safusion" / "overlap.json").exists():
        folder = folder / "safusion"
    overlap = _read(folder / "overlap.json", _overlap)
    if overlap is None:
        raise ValueError(
            f"no overlap.json in {folder}: train with Trainer(callbacks=[OverlapProfiler()]), which writes it at the "
            "end of a fit, to safusion/ in the logger's directory or to its dirpath"
        )
    recorded = datetime.fromtimestamp((folder / "overlap.json").stat().st_mtime, timezone.utc)
    missing = _read(folder / "missing_rate.json", _missing)
    if missing is not None and missing.run != overlap.run:
        return Run(folder, recorded, overlap, stale=("missing_rate.json",))
    return Run(folder, recorded, overlap, missing)


def _read(path: Path, parse: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    """What a file says; None if there is none."""
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


def _overlap(content: Mapping[str, Any]) -> Overlap:
    costs, plan, timeline = content["costs"], content["plan"], content["timeline"]
    return Overlap(
        run=float(content["run"]),
        system=content["system"],
        world_size=int(content["world_size"]),
        device=content["device"],
        plain_ddp=content["plain_ddp"],
        density=content["density"],
        settings=dict(content["settings"]),
        profiler=dict(content["profiler"]),
        versions=dict(content["versions"]),
        command=content["command"],
        steps={int(row["step"]): _figures(row) for row in content["steps"]},
        ranks=tuple(map(_figures, content["ranks"])),
        mean=_figures(content["mean"]),
        slowest=(int(content["slowest_rank"]), _number(content["skew_s"])),
        buffers=tuple(map(_buffer, content["buffers"])),
        plan=None if plan is None else Plan.from_list(plan),
        costs=None if costs is None else _costs(costs),
        timeline=None if timeline is None else StepTimeline.from_dict(timeline),
        decisions=tuple(map(_decision, content["decisions"])),
    )


def _number(value: float | None) -> float:
    return nan if value is None else float(value)


def _figures(row: Mapping[str, Any]) -> StepFigures:
    return StepFigures(**{each.name: _number(row.get(each.name)) for each in fields(StepFigures)})


def _buffer(row: Mapping[str, Any]) -> BufferRow:
    seconds = {name: _number(row[name]) for name in ("ready_s", "select_s", "exchange_s", "exposed_s", "decode_s")}
    tensors = tuple(map(str, row["tensors"]))
    return BufferRow(tensors, row["collective"], int(row["elements"]), int(row["bytes_sent"]), **seconds)


def _decision(row: Mapping[str, Any]) -> Decision:
    return Decision(**{each.name: row[each.name] for each in fields(Decision)})


def _costs(entries: Mapping[str, Any]) -> GroupCosts:
    values: dict[str, Any] = {each.name: entries[each.name] for each in fields(GroupCosts)}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return GroupCosts(**values)


def _missing(content: Mapping[str, Any]) -> Missing:
    names = [each.name for each in fields(MissingTensor)]
    tensors = (
        MissingTensor(**{n: row[n] for n in names} | {"rates": tuple(row["rates"])}) for row in content["tensors"]
    )
    samples, rate = int(content["samples"]), float(content["missing_rate"])
    return Missing(float(content["run"]), samples, tuple(content["steps"]), rate, tuple(tensors))
