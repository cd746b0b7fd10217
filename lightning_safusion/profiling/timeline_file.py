"""Timelines for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``: a process per rank, a lane per stream.

Every rank writes ``timeline_rank_00000.json`` in the Chrome format, in microseconds of rank 0's clock. Beside the
events a file holds ``"safusion"``: ``run`` (the same in all files of a fit), ``rank``, ``world_size``, ``host``,
``clock_offset_s`` (subtracted from this rank's clock) and ``clock_error_s`` (the largest possible error of that);
:func:`clock_offsets` finds both.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_safusion.profiling.timeline import Interval, StepTimeline, buffer_name

LANES = {"training": 0, "select": 1, "exchange": 2, "exposed": 3, "decode": 4}
_FILES = "timeline_rank_*.json"
_SHOWN_TENSORS = 32  # names in the arguments of one event

Event = dict[str, Any]


def timeline_events(steps: Sequence[StepTimeline], rank: int, host: str = "", offset: float = 0.0) -> list[Event]:
    """The events of one rank, whose clock is ``offset`` seconds ahead of rank 0's."""
    names = [("process", 0, f"rank {rank}" + (f" on {host}" if host else ""), rank)]
    names += [("thread", tid, lane, tid) for lane, tid in LANES.items()]
    events: list[Event] = []
    for kind, tid, name, place in names:  # labels and order in the viewer
        events.append({"ph": "M", "tid": tid, "name": f"{kind}_name", "args": {"name": name}})
        events.append({"ph": "M", "tid": tid, "name": f"{kind}_sort_index", "args": {"sort_index": place}})
    for step in steps:
        timed = _bar("training", f"step {step.step}", (step.begin, step.end))
        for phase in step.phases:
            timed += _bar("training", phase.name, (phase.begin, phase.end))
        timed += [*_buffers(step, f"{rank}.{step.step}"), *_bytes_under_way(step)]
        events += [each | {"ts": (each["ts"] - offset) * 1e6} for each in timed]
    return [{"pid": rank, **each} for each in events]


# The events below have their moments in seconds of the rank's own clock.


def _event(phase: str, name: str, moment: float, lane: str = "training", **more: Any) -> Event:
    return {"ph": phase, "name": name, "tid": LANES[lane], "ts": moment, **more}


def _bar(lane: str, name: str, interval: Interval, **args: Any) -> list[Event]:
    """A bar, nested in those that enclose it; none if the interval is empty or not known."""
    begin, end = interval
    return [_event("X", name, begin, lane, dur=(end - begin) * 1e6, args=args)] if begin < end else []


def _buffers(step: StepTimeline, key: str) -> Iterator[Event]:
    """The moments of each buffer; ``key`` is unique to the step."""
    for number, buffer in enumerate(step.buffers):
        for tensor, moment in zip(buffer.tensors, buffer.ready, strict=True):
            if not isnan(moment):
                yield _event("i", f"{tensor} ready", moment, s="t")
        name = buffer_name(buffer.tensors)
        args = {
            "tensors": list(buffer.tensors[:_SHOWN_TENSORS]),
            "number of tensors": len(buffer.tensors),
            "collective": buffer.events.collective,
            "elements": buffer.events.elements,
            "bytes sent": buffer.events.bytes_sent,
        }
        for lane in ("select", "exposed", "decode"):
            yield from _bar(lane, name, getattr(buffer, lane), **args)
        begin, end = buffer.exchange
        # collectives overlap each other: their begins and ends are matched by an id
        matched = {"cat": "exchange", "id": f"{key}.{number}"}
        yield _event("b", name, begin, "exchange", **matched, args=args)
        yield _event("e", name, max(begin, end), "exchange", **matched)


def _bytes_under_way(step: StepTimeline) -> Iterator[Event]:
    """A counter of the bytes that were given to collectives which have not ended."""
    begun = [(buffer.exchange[0], buffer.events.bytes_sent) for buffer in step.buffers]
    ended = [(max(buffer.exchange), -buffer.events.bytes_sent) for buffer in step.buffers]
    level = 0
    for moment, change in sorted(begun + ended):
        level += change
        yield _event("C", "bytes under way", moment, args={"bytes": level})


def write_timeline(folder: Path, events: Sequence[Event], about: Mapping[str, Any]) -> Path:
    """Writes the events of one rank to a run's directory, with the entry ``"safusion"``; returns the file."""
    path = folder / f"timeline_rank_{about['rank']:05d}.json"
    _write(path, {"traceEvents": list(events), "displayTimeUnit": "ms", "safusion": dict(about)})
    return path


def merge_timelines(run_dir: Path, output: Path | None = None) -> Path:
    """Merges as :func:`timeline` does, without timelines of older runs in the same directory; returns the file.

    Raises:
        ValueError: If there are no timelines, those of some ranks are missing, or a file is no timeline.
    """
    if run_dir.is_file():
        raise ValueError(_no_directory(run_dir))
    if not any(run_dir.glob(_FILES)) and (run_dir / "safusion").is_dir():
        run_dir = run_dir / "safusion"  # where callbacks write, below the logger's directory
    paths = sorted(run_dir.glob(_FILES))
    if not paths:
        raise ValueError(f"no {_FILES} in {run_dir}: OverlapProfiler writes them at the end of a fit")
    timelines = [_read(path) for path in paths]
    newest = max(timelines, key=lambda each: each["safusion"]["run"])["safusion"]
    timelines = [each for each in timelines if each["safusion"]["run"] == newest["run"]]
    missing = set(range(newest["world_size"])) - {each["safusion"]["rank"] for each in timelines}
    if missing:
        ranks = ", ".join(map(str, sorted(missing)[:20]))
        raise ValueError(f"no timeline of rank {ranks} in {run_dir}: copy the files of the other hosts there first")
    events = [event for each in timelines for event in each["traceEvents"]]
    zero = min((event["ts"] for event in events if "ts" in event), default=0.0)
    events = [event | {"ts": event["ts"] - zero} if "ts" in event else event for event in events]
    output = run_dir / "timeline.json" if output is None else output
    about = {"run": newest["run"], "ranks": [each["safusion"] for each in timelines]}
    _write(output, {"traceEvents": events, "displayTimeUnit": "ms", "safusion": about})
    return output


def timeline(run_dir: Path, output: Path | None = None) -> None:
    """Merges the timelines that OverlapProfiler has written on all ranks; open the result in https://ui.perfetto.dev.

    Args:
        run_dir: The directory with ``timeline_rank_*.json``, or the logger's directory around it.
        output: File to write, compressed if it ends in ``.gz``; ``timeline.json`` beside the others by default.
    """
    print(f"{merge_timelines(run_dir, output)}: open it in https://ui.perfetto.dev")


def _no_directory(path: Path) -> str:
    kind = "no directory"
    with contextlib.suppress(TypeError, ValueError):
        if "tensors" in json.loads(path.read_bytes()):
            kind = "a job's trace, which safusion plan --trace reads"
    return f"{path} is {kind}: give the directory with {_FILES} of OverlapProfiler"


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        _ = content["safusion"]["run"], content["safusion"]["world_size"], content["traceEvents"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no timeline of OverlapProfiler: {error!r}") from error
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, allow_nan=False).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def gather(tensor: Tensor) -> Tensor:
    """Gathers a tensor [N] of all ranks of the default process group into [world_size, N]. A collective."""
    if not dist.is_initialized():
        return tensor[None]
    everyone = tensor.new_empty(dist.get_world_size(), len(tensor))
    dist.all_gather(list(everyone), tensor)
    return everyone


def meet(device: torch.device, rounds: int = 8) -> np.ndarray:
    """Synchronises all ranks in rounds. A collective.

    Returns:
        float64 [world_size, 2, rounds]: of each rank, ``perf_counter`` seconds before and after each round.
    """
    # the first collective of a process may open connections
    gather(torch.zeros(1, dtype=torch.float32, device=device)).cpu()
    moments = np.empty((2, rounds))
    for i in range(rounds):
        moments[0, i] = perf_counter()
        gather(torch.zeros(1, dtype=torch.float32, device=device)).cpu()
        moments[1, i] = perf_counter()
    mine = torch.from_numpy(moments.reshape(-1)).to(device)
    return gather(mine).cpu().numpy().reshape(-1, 2, rounds)


def clock_offsets(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds by which the clocks of all ranks are ahead of rank 0's, from the moments of :func:`meet`.

    No rank leaves a round before all have entered it, so the offset of rank r lies between ``before[r] - after[0]`` and
    ``after[r] - before[0]`` of every round. The middle of the intersection of all rounds is within the returned error
    of the truth. A rank whose interval holds 0 shares its clock with rank 0: no two hosts are started within a
    millisecond.

    Returns:
        float64 [world_size], seconds; and float64 [world_size], the largest possible error.
    """
    before, after = moments[:, 0], moments[:, 1]
    low = (before - after[0]).max(axis=1)
    high = (after - before[0]).min(axis=1)
    shared = (low <= 0) & (high >= 0)
    return np.where(shared, 0.0, (low + high) / 2), np.where(shared, 0.0, (high - low) / 2)
