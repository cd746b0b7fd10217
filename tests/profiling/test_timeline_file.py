"""Timelines for Perfetto: their events, the command that merges those of all ranks, and the clocks of hosts."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_safusion.profiling.timeline_file import (
    LANES,
    clock_offsets,
    meet,
    merge_timelines,
    timeline_events,
    write_timeline,
)
from lightning_safusion.profiling.trace import Trace, TraceTensor
from safusion_command import main
from tests.process_group import run_ranks
from tests.profiling.steps import cpu_step, plain_step, unrecorded


def write(folder: Path, rank: int = 0, run: float = 1.0, world_size: int = 1, step: Any = None, **more: Any) -> Path:
    """A rank's timeline of one step."""
    about = {"run": run, "rank": rank, "world_size": world_size, "host": "a"}
    about |= {"clock_offset_s": 0.0, "clock_error_s": 0.0}
    return write_timeline(folder, timeline_events([step or cpu_step()], rank, **more), about)


def of(events: list[dict[str, Any]], lane: str, phase: str = "X") -> list[tuple[str, float, float]]:
    """Name, begin and length in seconds of the bars in a lane."""
    chosen = [event for event in events if event["ph"] == phase and event["tid"] == LANES[lane]]
    return [(event["name"], event["ts"] / 1e6, event.get("dur", 0.0) / 1e6) for event in chosen]


def test_every_part_has_its_lane() -> None:
    events = timeline_events([cpu_step()], rank=3, host="node7")
    assert of(events, "training") == [
        *(("step 7", 0.0, 23.0), ("data", 0.0, 1.0), ("forward", 1.0, 3.0)),
        *(("backward", 4.0, 16.0), ("optimizer", 20.0, 2.0)),
    ]
    first, second = "layer0.weight +1", "layer2.weight +2"
    assert of(events, "select") == [(first, 6.0, 1.0), (second, 12.0, 1.0)]
    assert of(events, "exposed") == [(second, 16.0, 2.0)]
    assert of(events, "decode") == [(first, 15.0, 1.0), (second, 18.0, 1.0)]
    assert of(events, "exchange", "b") == [(first, 7.0, 0.0), (second, 13.0, 0.0)]
    assert of(events, "exchange", "e") == [(first, 10.0, 0.0), (second, 18.0, 0.0)]
    assert [name for name, *_ in of(events, "training", "i")] == [f"layer{i}.weight ready" for i in range(5)]
    assert {event["pid"] for event in events} == {3}
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"rank 3 on node7", *LANES}


def test_ids_of_collectives_are_unique_also_between_steps() -> None:
    events = timeline_events([cpu_step(7), cpu_step(8)], rank=0)
    begun = Counter(event["id"] for event in events if event["ph"] == "b")
    assert set(begun.values()) == {1}
    assert begun == Counter(event["id"] for event in events if event["ph"] == "e")


def test_the_counter_holds_the_bytes_under_way() -> None:
    events = [event for event in timeline_events([cpu_step()], 0) if event["ph"] == "C"]
    levels = [(event["ts"] / 1e6, event["args"]["bytes"]) for event in events]
    assert levels == [(7.0, 300), (10.0, 0), (13.0, 300), (18.0, 0)]


def test_times_are_of_the_first_ranks_clock() -> None:
    events = timeline_events([cpu_step()], rank=1, offset=-5.0)
    assert of(events, "training")[0] == ("step 7", 5.0, 23.0)


@pytest.mark.parametrize("step", [unrecorded(cpu_step()), plain_step()])
def test_files_are_json_also_where_moments_are_unknown(tmp_path: Path, step: Any) -> None:
    path = write(tmp_path, step=step)
    assert path.name == "timeline_rank_00000.json"
    assert json.loads(path.read_text())["displayTimeUnit"] == "ms"


def test_the_command_merges_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write(tmp_path, rank, world_size=2, offset=100.0 + rank)
    write(tmp_path, 2, run=0.5, world_size=3)  # of an older run
    main(["timeline", str(tmp_path)])
    assert "perfetto" in capsys.readouterr().out
    merged = json.loads((tmp_path / "timeline.json").read_text())
    events = merged["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert min(event["ts"] for event in events if "ts" in event) == 0.0  # rank 1, whose clock is ahead
    assert of([event for event in events if event["pid"] == 0], "training")[0] == ("step 7", 1.0, 23.0)
    assert [rank["rank"] for rank in merged["safusion"]["ranks"]] == [0, 1]


def test_a_merged_timeline_can_be_compressed(tmp_path: Path) -> None:
    write(tmp_path)
    path = merge_timelines(tmp_path, tmp_path / "all.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no timeline_rank_\*.json in .*OverlapProfiler writes"):
        merge_timelines(tmp_path)
    write(tmp_path, 1, world_size=4)
    with pytest.raises(ValueError, match="no timeline of rank 0, 2, 3"):
        merge_timelines(tmp_path)
    (tmp_path / "timeline_rank_00000.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="timeline_rank_00000.json is no timeline of OverlapProfiler"):
        merge_timelines(tmp_path)


def test_files_below_the_loggers_directory_are_found(tmp_path: Path) -> None:
    (tmp_path / "safusion").mkdir()
    write(tmp_path / "safusion")
    assert merge_timelines(tmp_path) == tmp_path / "safusion" / "timeline.json"


def test_a_trace_of_a_job_is_no_timeline_and_the_other_way_round(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    Trace("job", (TraceTensor("t", (1,), 0.1),)).save(trace)
    with pytest.raises(
        SystemExit, match=r"trace.json is a job's trace, which safusion plan --trace reads: give the dir"
    ):
        main(["timeline", str(trace)])
    path = write(tmp_path)
    with pytest.raises(SystemExit, match=r"timeline_rank_00000.json is no directory: give the directory with"):
        main(["timeline", str(path)])
    with pytest.raises(SystemExit, match=r"timeline_rank_00000.json is a timeline of steps for Perfetto"):
        main(["plan", "--trace", str(path)])
    packed = merge_timelines(tmp_path, tmp_path / "all.json.gz")
    with pytest.raises(SystemExit, match=r"all.json.gz is not a trace"):
        main(["plan", "--trace", str(packed)])


def meetings(offsets: list[float], seed: int, rounds: int = 8) -> np.ndarray:
    """Ranks enter a barrier at random moments and leave it after random delays, by clocks of their own."""
    generator = np.random.default_rng(seed)
    count = len(offsets)
    before = np.cumsum(generator.exponential(2e-3, (rounds, 1)), axis=0) + generator.exponential(3e-4, (rounds, count))
    after = before.max(axis=1, keepdims=True) + generator.exponential(1e-4, (rounds, count))
    return np.stack([before.T, after.T], axis=1) + np.array(offsets)[:, None, None]


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_is_within_the_error(seed: int) -> None:
    true = np.array([0.0, 1234.5, -0.25])
    offsets, errors = clock_offsets(meetings(true.tolist(), seed))
    assert (np.abs(offsets - true) <= errors + 1e-12).all()
    assert (errors < 1e-3).all()
    assert offsets[0] == errors[0] == 0.0


def test_processes_of_one_host_share_a_clock() -> None:
    offsets, errors = clock_offsets(meetings([7.0, 7.0, 7.0], seed=3))
    assert not offsets.any()
    assert not errors.any()


def test_real_ranks_of_one_host_share_a_clock() -> None:
    mine, theirs = run_ranks(2, lambda rank: meet(torch.device("cpu")))
    np.testing.assert_array_equal(mine, theirs)
    assert mine.shape == (2, 2, 8)
    assert (mine[:, 0] < mine[:, 1]).all()
    assert not clock_offsets(mine)[0].any()


def test_a_single_process_has_its_own_clock() -> None:
    offsets, errors = clock_offsets(meet(torch.device("cpu"), rounds=2))
    assert offsets.tolist() == errors.tolist() == [0.0]
