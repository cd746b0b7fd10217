"""Measured costs: as a file, as a cluster, and in the planner."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.plan.calibration import Calibration, CollectiveSample, CollectiveTimes
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.device import Device
from lightning_safusion.tools.plan.engine import simulate
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.schedule import Message, Schedule
from lightning_safusion.tools.plan.systems import run_system


def straight(line: LinearCost) -> CollectiveTimes:
    """Samples of a line."""
    return CollectiveTimes(tuple(CollectiveSample(size, line(size)) for size in (100, 10_000)))


COSTS = Calibration(
    workers=4,
    allgather=straight(LinearCost(3e-3, 3e-6)),
    allreduce=straight(LinearCost(4e-3, 2e-6)),
    entry_bytes=6.0,
    select=SelectionCost(5e-3, 3e-8),
    decode=1e-7,
    source="made up",
)
#: The costs of accelerators.
ON_DEVICES = replace(COSTS, select=None, decode=None)
SOME = "ddp,saf-pooled"
TRACE = Trace("job", tuple(TraceTensor(f"t{i}", (1000, 10), 0.01) for i in range(3)), 0.005, "made up")


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    for costs in (replace(COSTS, jitter=0.03, nodes=2, per_node=2, device="h100"), ON_DEVICES):
        costs.save(tmp_path / "costs.json")
        assert Calibration.load(tmp_path / "costs.json") == costs
    with pytest.raises(ValueError, match="no calibration"):
        Calibration.load(tmp_path / "missing.json")
    (tmp_path / "weights.pt").write_bytes(bytes(range(256)))
    readers: tuple[type[Calibration] | type[Device], ...] = (Calibration, Device)
    for reader in readers:
        with pytest.raises(ValueError, match=r"weights.pt (is no calibration|has no costs of a device)"):
            reader.load(tmp_path / "weights.pt")


def test_a_file_of_an_older_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    old = {"format": "lightning-safusion-calibration", "version": 2, "workers": 2, "allgather": {"fixed": 1e-3}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="version 2, expected .* version 3; .*safusion bench --calibrate true"):
        Calibration.load(tmp_path / "old.json")


def test_between_measured_sizes_lies_a_straight_line() -> None:
    times = CollectiveTimes((CollectiveSample(100, 1.0), CollectiveSample(300, 3.0)))
    assert times.at(200).seconds == pytest.approx(2.0)
    # below the smallest size as for that one, above the largest along the last line
    assert times.at(10).seconds == 1.0
    assert times.at(500).seconds == pytest.approx(5.0)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="two workers or more"):
        replace(COSTS, workers=1)
    with pytest.raises(ValueError, match="cost of select"):
        replace(COSTS, select=SelectionCost(-1.0, 0.0))
    with pytest.raises(ValueError, match="cost of decode"):
        replace(COSTS, decode=math.nan)
    with pytest.raises(ValueError, match="entry_bytes=0"):
        replace(COSTS, entry_bytes=0)
    wrong: list[dict[str, Any]] = [{"nodes": 2}, {"per_node": 4}, {"nodes": 2, "per_node": 4}]
    for placed in wrong:
        with pytest.raises(ValueError, match="4 workers are nodes times workers on each"):
            replace(COSTS, **placed)


def test_the_same_group_takes_measured_times_and_another_one_those_of_the_link() -> None:
    same = Cluster.calibrated(COSTS, 4)
    assert same.allgather(1000).seconds == pytest.approx(6e-3)
    assert same.allreduce(1000).seconds == pytest.approx(6e-3)
    assert same.allgather(1000).nbytes == 3000
    other = Cluster.calibrated(COSTS, 8)
    # one millisecond for the two rounds more of an all-reduce: alpha; what is left of three is the launch
    assert other.allgather(1000).seconds == pytest.approx(2e-3 + 3 * 0.5e-3 + 7 * 1000 * 1e-6)


def test_decoding_on_processors_waits_for_the_end_of_backward() -> None:
    cluster = Cluster.calibrated(COSTS, 4)
    messages = [Message([place], cluster.allgather(100), decode=0.01) for place in range(3)]
    schedule = Schedule(messages, engine=False)
    exchange = messages[0].cost.seconds
    # backward ends at 30 ms, and with it the exchange of the last gradient begins; the others are decoded meanwhile
    last = simulate(TRACE, cluster, schedule)
    assert last.seconds == pytest.approx(0.03 + max(2 * 0.01, exchange) + 0.01 + 0.005)
    # a device decodes as soon as it can, and goes on with backward afterwards
    beside = simulate(TRACE, Cluster(4), schedule)
    assert beside.seconds == pytest.approx(0.03 + 2 * 0.01 + exchange + 0.01 + 0.005)
    assert beside.device == pytest.approx(3 * 0.01)


def test_the_planner_takes_the_file(tmp_path: Path, plan: Callable[..., str]) -> None:
    TRACE.save(tmp_path / "trace.json")
    options = {"trace": "trace.json", "output": "out", "nodes": 4, "gpus_per_node": 1, "density": 0.01}
    shown = plan(COSTS, systems="syncea", **options)
    assert "Costs: made up." in shown
    # one buffer of 30 000 elements, of which 300 are sent by each of four workers
    expected = 0.03 + (5e-3 + 9e-4) + (3e-3 + 1800 * 3e-6) + 1200 * 1e-7 + 0.005
    job = Job(TRACE, Cluster.calibrated(COSTS, 4), 0.01, COSTS.entry_bytes)
    assert run_system("syncea", job).seconds == pytest.approx(expected)
    assert f"{expected * 1e3:.1f}" in shown


@pytest.mark.parametrize(
    ("options", "title", "device"),
    [
        ({}, "2 x 2 workers (nodes and workers of a node as in costs.json) at", "H100 80GB HBM3"),
        ({"nodes": 4}, "4 x 2 workers (workers of a node as in costs.json) at", "H100 80GB HBM3"),
        ({"gpus_per_node": 8, "device": "a100"}, "2 x 8 workers (nodes as in costs.json) at", "A100 80GB SXM"),
        ({"nodes": 4, "gpus_per_node": 1}, "4 x 1 workers at the rate of costs.json", "H100 80GB HBM3"),
    ],
)
def test_the_hardware_is_that_of_the_job(
    options: dict[str, Any], title: str, device: str, plan: Callable[..., str]
) -> None:
    printed = plan(replace(ON_DEVICES, nodes=2, per_node=2, device="h100"), systems=SOME, **options)
    assert title in printed
    assert f"Device: {device}" in printed
    assert ("It is the calibration's." in printed) == ("device" not in options)


def test_workers_on_processors_count_as_nodes(plan: Callable[..., str]) -> None:
    printed = plan(replace(COSTS, nodes=2, per_node=2), systems=SOME)
    assert "4 x 1 workers (nodes and workers of a node as in" in printed
    assert "Costs: made up. Each worker counts as a node" in printed


def test_files_that_do_not_say_on_how_many_nodes_they_were_made(plan: Callable[..., str]) -> None:
    unplaced = {name: each for name, each in asdict(ON_DEVICES).items() if name not in ("nodes", "per_node", "device")}
    old = {"format": "lightning-safusion-calibration", "version": 3, **unplaced}
    given: list[dict[str, Any]] = [{}, {"nodes": 2}]
    for options in given:
        with pytest.raises(ValueError, match=r"costs.json does not say .* 4 workers were: give --nodes and --gpus-per"):
            plan(old, systems=SOME, **options)
    printed = plan(old, systems=SOME, nodes=2, gpus_per_node=2)
    assert "2 x 2 workers at" in printed
    assert "The calibration names none that is known: give --device." in printed
    # on processors each worker counts as a node
    processors = {name: asdict(COSTS)[name] for name in ("select", "decode")}
    assert "4 x 1 workers" in plan(old | processors, systems=SOME)


def test_costs_of_devices_leave_the_work_to_be_counted() -> None:
    cluster = Cluster.calibrated(ON_DEVICES, 2, 2)
    assert cluster.device == Cluster(2, 2).device
    assert not cluster.device.processors
    assert cluster.allgather(100).seconds == COSTS.allgather.at(100).seconds
    assert Cluster.calibrated(ON_DEVICES, 4, 2).measured == {}
    assert Cluster.calibrated(COSTS, 4).device.processors
