"""``python -m lab bench`` on tiny models and the loopback, and, as root, over shaped links."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.bench import links
from lab.bench.measure import Rhythm, Task, measure
from lab.bench.run import bench as measured
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.bench.rows import FLOOR, IN_STEP
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.team import Place
from tests.e2e.processes import need
from tests.process_group import run_alone

NAMESPACES = Path("/var/run/netns")
SHORT: dict[str, Any] = {"size": "tiny", "batch_size": 2, "rounds": 1, "block": 2, "warmup": 3}


def bench(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Runs the command in a process of its own, which has no threads, and reads what it wrote."""
    run_alone(lambda: measured(output=folder, **(SHORT | options)))
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.slow
def test_a_run_on_the_loopback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (record,) = bench(tmp_path, systems=["wfbp", "saf-inter"], density=[0.1], calibrate=True)
    rows = {row["system"]: row for row in record["systems"]}
    assert list(rows) == [FLOOR, IN_STEP, "ddp", "wfbp", "saf-inter"]
    assert all(row["step_s"] > 0 and row["peak_bytes"] > 0 for row in rows.values())
    assert rows[IN_STEP]["bytes_sent"] is None
    assert rows[FLOOR]["over_floor"] == rows["ddp"]["over_ddp"] == 1.0
    assert rows["wfbp"]["buffers"] == 23  # tensors of the network
    assert rows["saf-inter"]["buffers"] == 3
    assert rows["saf-inter"]["density"] == pytest.approx(0.1, rel=0.1)
    assert rows["ddp"]["bytes_sent"] is None
    assert record["bandwidth"] is None
    assert "loopback" in record["title"]
    assert (tmp_path / "bench.png").stat().st_size > 0
    shown = capfd.readouterr().out
    assert "quartiles" in shown
    assert "saf-inter" in shown
    costs = Calibration.load(tmp_path / "calibration-loopback-0.1.json")
    assert costs.workers == 2
    assert costs.allgather.at(1e6).seconds > 0
    assert costs.select(10_000) > 0
    assert len(Trace.load(tmp_path / "trace-loopback-0.1.json").tensors) == 23


@pytest.mark.slow
def test_paced_workers_are_called_that(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (record,) = bench(tmp_path, systems=["saf-inter"], paced="resnet-50", scale=0.001, workers=3)
    assert record["paced"]
    assert "paced: resnet-50 x 0.001" in record["title"]
    assert "3 workers" in record["title"]
    floor = record["systems"][0]
    assert floor["step_s"] >= 0.06  # the trace's own time, slept through
    assert "Paced: workers sleep" in " ".join(capfd.readouterr().out.split())


def test_without_root_the_loopback_is_measured_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.bench.run.why_no_links", lambda: "network namespaces need root")
    (record,) = bench(tmp_path, systems=["saf-inter"], bandwidth=["100mbit"])
    assert record["bandwidth"] is None
    assert "cannot be made: network namespaces need root" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"systems": ["saffusion"]}, "unknown system 'saffusion'"),
        ({"systems": ["saf-pooled[wire=q4,densty=1]"]}, "unknown option 'densty'"),
        ({"model": "mlp"}, "unknown model 'mlp'"),
        ({"density": [0.0]}, "density is a share"),
        ({"workers": 1}, "a single worker exchanges nothing"),
        ({"bandwidth": ["fast"]}, "the rate of a link is written as"),
        ({"rounds": 0}, "needs 1 round"),
        ({"block": 1}, "blocks of 2 steps"),
        ({"scale": 0.5}, "scale=0.5 scales a trace"),
        ({"slow_motion": 4.0}, "slow_motion=4 is of a trace"),
        ({"paced": "bert-base", "slow_motion": 0.5}, "slow motion makes times 1 or more"),
        ({"paced": "bert"}, "unknown trace 'bert'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_printed(
    tmp_path: Path, options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        measured(output=tmp_path, **(SHORT | options))
    assert not capfd.readouterr().out


def test_a_worker_that_fails_is_reported_with_its_log(tmp_path: Path) -> None:
    def fail() -> str:
        task = Task("conv", "tiny", 2, density=0.5)
        object.__setattr__(task, "size", "huge")  # in the workers, not here
        with pytest.raises(RuntimeError) as failure:
            measure(task, ["ddp"], Place(2), Rhythm(1, 2, 1), tmp_path, Console())
        return str(failure.value)

    message = run_alone(fail)
    assert "a worker of 'ddp' failed: ValueError: unknown size 'huge'" in message
    assert str(tmp_path / "ddp.log") in message
    assert "Traceback" in (tmp_path / "ddp.log").read_text()


@pytest.mark.slow
def test_over_a_slow_link_ddp_waits_and_its_bytes_are_counted(tmp_path: Path) -> None:
    need("ip", "tc")
    (record,) = bench(tmp_path, systems=["saf-inter"], bandwidth=["20mbit"], rounds=2, block=4)
    floor, in_step, ddp, sparse = record["systems"]
    nbytes = 4 * record["parameters"]
    # two workers send and receive the whole gradient, in packets with headers
    assert nbytes < ddp["wire_bytes"] < 1.25 * nbytes
    assert ddp["step_s"] > 0.8 * nbytes * 8 / 20e6  # a step takes no less than its bytes need
    # what these two send is the bench's own: a barrier and the ends of blocks
    assert max(floor["wire_bytes"], in_step["wire_bytes"]) < 0.01 * nbytes + 2000
    assert sparse["wire_bytes"] < 0.2 * ddp["wire_bytes"]


@pytest.mark.slow
def test_links_are_removed_if_the_program_is_terminated() -> None:
    need("ip", "tc")
    script = """
import time
from lab.bench.links import linked_namespaces
with linked_namespaces(2) as machines:
    print(machines[0].name, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        assert (NAMESPACES / name).exists()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not (NAMESPACES / name).exists()


def test_rates() -> None:
    assert links.bits_per_second("2.5gbit") == 2.5e9
    assert links.bits_per_second("500kbit") == 5e5
    for wrong in ("100", "0mbit", "100mbps", "mbit"):
        with pytest.raises(ValueError, match="as in '100mbit'"):
            links.bits_per_second(wrong)


def test_hooks_of_ddp_need_little_warmup_with_or_without_options() -> None:
    assert Rhythm(warmup=30).warmup_of("powersgd-rank4[lr=0.1]") == 12
    assert Rhythm(warmup=30).warmup_of("saf-pooled[wire=q4]") == 30
