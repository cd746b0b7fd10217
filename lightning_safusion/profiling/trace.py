"""Traces for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``: a process per rank, a lane per stream.

Every rank writes ``trace_rank_00000.json`` in the Chrome format, in microseconds of rank 0's clock. Beside the events a
file holds ``"safusion"``: ``run`` (the same in all files of a fit), ``rank``, ``world_size``, ``host``,
``clock_offset_s`` (subtracted from this rank's clock) and ``clock_error_s`` (the largest possible error of that).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from lightning_safusion.profiling.intervals import Interval
from lightning_safusion.profiling.timeline import BufferTimeline, StepTimeline

LANES = {"training": 0, "select": 1, "exchange": 2, "exposed": 3, "decode": 4}
_SHOWN_TENSORS = 32  # names in the arguments of one event

Event = dict[str, Any]


def trace_events(steps: Sequence[StepTimeline], rank: int, host: str = "", offset: float = 0.0) -> list[Event]:
    """The events of one rank.

    Args:
        steps: What it did.
        rank: Its number.
        host: Its host.
        offset: Seconds that its clock is ahead of rank 0's.
    """
    writer = _Writer(rank, offset)
    writer.names(host)
    for step in steps:
        writer.bar("training", f"step {step.step}", (step.begin, step.end))
        for phase in step.phases:
            writer.bar("training", phase.name, (phase.begin, phase.end))
        for number, buffer in enumerate(step.buffers):
            writer.buffer(buffer, f"{rank}.{step.step}.{number}")
        writer.bytes_under_way(step.buffers)
    return writer.events


class _Writer:
    def __init__(self, rank: int, offset: float) -> None:
        self.rank = rank
        self.offset = offset
        self.events: list[Event] = []

    def _add(self, phase: str, name: str, moment: float, lane: str = "training", **more: Any) -> None:
        ts = (moment - self.offset) * 1e6
        self.events.append({"ph": phase, "name": name, "pid": self.rank, "tid": LANES[lane], "ts": ts, **more})

    def names(self, host: str) -> None:
        """How the viewer calls and sorts processes and lanes."""
        self._name("process", 0, f"rank {self.rank}" + (f" on {host}" if host else ""), self.rank)
        for lane, tid in LANES.items():
            self._name("thread", tid, lane, tid)

    def _name(self, kind: str, tid: int, name: str, place: int) -> None:
        about = {"ph": "M", "pid": self.rank, "tid": tid}
        self.events.append({**about, "name": f"{kind}_name", "args": {"name": name}})
        self.events.append({**about, "name": f"{kind}_sort_index", "args": {"sort_index": place}})

    def bar(self, lane: str, name: str, interval: Interval, **args: Any) -> None:
        """Something that took a while, nested in what encloses it."""
        begin, end = interval
        if begin < end:
            self._add("X", name, begin, lane, dur=(end - begin) * 1e6, args=args)

    def buffer(self, buffer: BufferTimeline, key: str) -> None:
        """One buffer's way through a step; ``key`` is its alone."""
        for tensor, moment in zip(buffer.tensors, buffer.ready, strict=True):
            if not isnan(moment):
                self._add("i", f"{tensor} ready", moment, s="t")
        args = {
            "tensors": list(buffer.tensors[:_SHOWN_TENSORS]),
            "number of tensors": len(buffer.tensors),
            "collective": buffer.events.collective,
            "elements": buffer.events.elements,
            "bytes sent": buffer.events.bytes_sent,
        }
        for lane in ("select", "exposed", "decode"):
            self.bar(lane, buffer.name, getattr(buffer, lane), **args)
        begin, end = buffer.exchange
        # collectives overlap each other: begin and end are told apart by an id
        self._add("b", buffer.name, begin, "exchange", cat="exchange", id=key, args=args)
        self._add("e", buffer.name, max(begin, end), "exchange", cat="exchange", id=key)

    def bytes_under_way(self, buffers: Iterable[BufferTimeline]) -> None:
        """A counter of the bytes that were given to collectives which have not ended."""
        changes = []
        for buffer in buffers:
            begin, end = buffer.exchange
            changes += [(begin, buffer.events.bytes_sent), (max(begin, end), -buffer.events.bytes_sent)]
        level = 0
        for moment, change in sorted(changes):
            level += change
            self._add("C", "bytes under way", moment, args={"bytes": level})


def write_trace(folder: Path, events: Sequence[Event], about: Mapping[str, Any]) -> Path:
    """Writes one rank's file.

    Args:
        folder: The run's directory; it exists.
        events: Of :func:`trace_events`.
        about: The entry ``"safusion"``; see the module.

    Returns:
        The file.
    """
    path = folder / f"trace_rank_{about['rank']:05d}.json"
    _write(path, {"traceEvents": list(events), "displayTimeUnit": "ms", "safusion": dict(about)})
    return path


def merge_traces(run_dir: Path, output: Path | None = None) -> Path:
    """Merges the traces of all ranks into one file. Those of older runs in the same directory are left out.

    Args:
        run_dir: Where the ranks have written their ``trace_rank_*.json``.
        output: File to write, compressed if it ends in ``.gz``; ``trace.json`` in the run's directory by default.

    Returns:
        The file that was written.

    Raises:
        ValueError: If there are no traces, those of some ranks are missing, or a file is no trace.
    """
    paths = sorted(run_dir.glob("trace_rank_*.json"))
    if not paths:
        raise ValueError(f"no trace_rank_*.json in {run_dir}: OverlapProfiler writes them at the end of a fit")
    traces = [_read(path) for path in paths]
    newest = max(traces, key=lambda trace: trace["safusion"]["run"])["safusion"]
    traces = [trace for trace in traces if trace["safusion"]["run"] == newest["run"]]
    missing = set(range(newest["world_size"])) - {trace["safusion"]["rank"] for trace in traces}
    if missing:
        ranks = ", ".join(map(str, sorted(missing)[:20]))
        raise ValueError(f"no trace of rank {ranks} in {run_dir}: copy the files of the other hosts there first")
    events = [event for trace in traces for event in trace["traceEvents"]]
    zero = min((event["ts"] for event in events if "ts" in event), default=0.0)
    events = [event | {"ts": event["ts"] - zero} if "ts" in event else event for event in events]
    output = run_dir / "trace.json" if output is None else output
    about = {"run": newest["run"], "ranks": [trace["safusion"] for trace in traces]}
    _write(output, {"traceEvents": events, "displayTimeUnit": "ms", "safusion": about})
    return output


def trace(run_dir: Path, output: Path | None = None) -> None:
    """Merges the traces that OverlapProfiler has written on all ranks; open the result in https://ui.perfetto.dev.

    Args:
        run_dir: The directory with ``trace_rank_*.json``.
        output: File to write, compressed if it ends in ``.gz``; ``trace.json`` in that directory by default.
    """
    print(f"{merge_traces(run_dir, output)}: open it in https://ui.perfetto.dev")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        _ = content["safusion"]["run"], content["safusion"]["world_size"], content["traceEvents"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no trace of OverlapProfiler: {error!r}") from error
    loaded: dict[str, Any] = content
    return loaded


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, allow_nan=False)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
