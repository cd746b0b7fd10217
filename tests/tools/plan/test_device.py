"""Devices: their file, their speeds, and the time of a step of the default by the counted work of its kernels."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import LINKS
from lightning_safusion.fusion.plans.costs import NOMINAL_SELECTION
from lightning_safusion.tools.plan import work
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.comparison import break_even, plan_table, when_to_compress
from lightning_safusion.tools.plan.device import DEVICES, Device, resolve_device
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.paths import FusedKernels, FusedShards, Path
from lightning_safusion.tools.plan.report import run_plan
from lightning_safusion.tools.plan.systems import build_schedule, run_system
from lightning_safusion.tools.plan.traces import resolve_trace
from lightning_safusion.tools.plan.work import Span, Work

MEASURED = Device("made up", 2e12, 5e-6, 1e13, factors={"decode": 1.5}, source="a test")


def test_a_file_brings_back_the_device(tmp_path: pathlib.Path) -> None:
    MEASURED.save(tmp_path / "device.json")
    assert resolve_device(tmp_path / "device.json") == MEASURED
    assert resolve_device("H100") is DEVICES["h100"]


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 0.0},
        {"launch": -1.0},
        {"instructions": float("nan")},
        {"factors": {"decoding": 1.0}},
        {"factors": {"decode": 0.0}},
        {"version": 99},
        {"colour": "green"},
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    path = tmp_path / "device.json"
    MEASURED.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"made up|device\.json"):
        resolve_device(path)


def test_unknown_devices_are_named() -> None:
    with pytest.raises(ValueError, match=r"'v100'.*'a100'"):
        resolve_device("v100")


def test_a_stage_takes_its_launches_and_the_longer_of_bytes_and_instructions() -> None:
    assert MEASURED.seconds({"write": Work(2, 4e9, 1e9)}) == pytest.approx(2 * 5e-6 + 2e-3)
    assert MEASURED.seconds({"write": Work(2, 4e9, 4e10)}) == pytest.approx(2 * 5e-6 + 4e-3)
    # as it was measured
    assert MEASURED.seconds({"decode": Work(1, 4e9)}) == pytest.approx(5e-6 + 3e-3)


def step_of(
    device: Device, workers: int, density: float = 0.1, by_update: bool = False, sharded: bool = False
) -> float:
    """Milliseconds of BERT-base's step in four buffers."""
    elements = 109.5e6 / 4
    span = Span(elements, density * elements, 50, by_update=by_update)
    path: Path = FusedKernels()
    if sharded:
        path = FusedShards(workers, ShardedExchange.scattered, ShardedExchange.gathered)
    each = [path.selection(span), path.decoding(span, workers), path.commitment(span)]
    return 1e3 * (4 * sum(map(device.seconds, each)) + device.seconds(work.END))


# What a copy reaches on an H100, 4 us, and instructions at half the rate at which it issues them at 1.755 GHz
EXACT = Device("any", 3e12, 4e-6, 132 * 64 * 1.755e9)


@pytest.mark.parametrize(
    ("density", "by_update", "gathered", "sharded"),
    [
        (0.02, True, [1.88, 2.50, 4.95], 2.47),  # the default with Adam
        (0.02, False, [1.59, 2.20, 4.66], 2.17),
        (0.1, True, [2.74, 4.41, 11.09], 4.13),
        (0.1, False, [2.45, 4.12, 10.80], 3.83),  # the default with SGD
    ],
)
def test_the_predicted_step_of_bert_base_is_that_of_the_documents(
    density: float, by_update: bool, gathered: list[float], sharded: float
) -> None:
    """The budgets of 2.6, 3.4 and 6 ms hold with 2 %; what is beyond them is on the page."""
    # a message is read 256 bits at a time by every program. With fewer entries a region has several tiles, and a
    # program passes over most of its bits
    found = [step_of(EXACT, workers, density, by_update) for workers in (2, 8, 32)]
    shards = step_of(EXACT, 32, density, by_update, sharded=True)
    assert [*found, shards] == pytest.approx([*gathered, sharded], abs=0.01)
    if density == 0.02:
        assert all(step <= budget for step, budget in zip(found, (2.6, 3.4, 6), strict=True))
    page = (pathlib.Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    assert " | ".join(f"{step:.2f}" for step in [*found, shards]) in page


def test_an_element_of_bert_base_moves_few_bytes_for_few_instructions() -> None:
    """The default with Adam, two workers: what Triton 3.6 and 3.9 make, whichever is longer."""
    elements = 109.5e6 / 4
    span = Span(elements, 0.02 * elements, 50, by_update=True)
    stages = [*work.selection(span).values(), *work.decoding(span, 2).values(), *work.commitment(span).values()]
    nbytes = sum(part.nbytes for part in stages) / elements
    instructions = sum(part.instructions for part in stages) / elements
    assert nbytes <= 32
    assert instructions <= 220
    page = " ".join((pathlib.Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text().split())
    assert f"{nbytes:.0f} bytes per element, and run about {round(instructions, -1):.0f} instructions" in page


def test_keys_that_are_written_once_cost_no_more_than_moments_in_two_passes() -> None:
    """A key that ``collect`` would make again needs no memory, but a root and a quotient."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    elements = 109.5e6 / 4
    keys = work.LOOPS["compensate by update"].length - work.LOOPS["compensate"].length
    instructions = keys * work.LOOPS["compensate"].threads / work.LOOPS["compensate"].items
    assert f"{instructions:.0f} instructions" in page
    for density in (0.1, 0.02):
        span = Span(elements, density * elements, 50)
        plain, keyed = work.selection(span), work.selection(replace(span, by_update=True))
        once = sum(part.nbytes - plain[name].nbytes for name, part in keyed.items()) / elements
        # the moment would be read in two passes
        assert once <= 2 * 4 + 1e-9
        assert f"{once:.1f}" in page


@cache
def bert_large(rate: str, nodes: int = 8, gpus: int = 8) -> Job:
    return Job(resolve_trace("bert-large"), Cluster(nodes, gpus, resolve_link(rate)), 0.05)


@pytest.mark.parametrize(
    ("job", "instructions"),
    [
        # keys 85, candidates, digits and counts 48, writing 7, packing 6; an owner reads parts of 63 messages 16,
        # selects and packs 4; reading and delivering sums 150, the residual 20
        (bert_large("25gbit"), 85 + 48 + 7 + 6 + 16 + 4 + 150 + 20),
        (bert_large("400gbit"), 85 + 48 + 7 + 6 + 16 + 4 + 150 + 20),
        # writing 13, packing 11, reading 4 messages 4 x 16, delivering 30
        (bert_large("25gbit", 4, 1), 84 + 46 + 13 + 11 + 4 * 16 + 30 + 19),
    ],
)
def test_the_planner_charges_64_workers_and_4_what_was_counted(job: Job, instructions: int) -> None:
    device = replace(job.cluster.device, factors={})  # whose kernels take what their bytes and instructions say
    result = run_system("saf-pooled", replace(job, cluster=replace(job.cluster, device=device)))
    launches = 15 * result.collectives / 2  # for each buffer
    expected = float(job.numels.sum()) * instructions / device.instructions + launches * device.launch
    assert result.device == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(("workers", "rate"), [(8, "25gbit"), (16, "1gbit"), (32, "25gbit"), (64, "10gbit")])
def test_shards_are_ahead_of_an_all_gather_where_the_default_takes_them(workers: int, rate: str) -> None:
    for job in (bert_large(rate, workers, 1), bert_large(rate, workers // 8, 8)):
        shards, gathered = run_system("saf-pooled", job), run_system("saf-pooled[collective=allgather]", job)
        assert shards.device < 1.02 * gathered.device
        assert shards.seconds < gathered.seconds


def test_it_says_from_where_on_compression_loses(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = bert_large("25gbit"), bert_large("200gbit")
    rate = break_even(slow, "saf-pooled")
    assert 25 < rate < 200
    assert break_even(replace(slow, density=0.9), "safusion-paper") == 0
    for job in (slow, fast):
        rows = plan_table(job, ["ddp", "saf-pooled"])
        assert f"From about {rate:.0f} Gbit/s on, DDP in bf16 is as fast" in when_to_compress(rows, job)
    never = replace(slow, density=0.9)
    assert "Do not compress this job" in when_to_compress(plan_table(never, ["safusion-paper"]), never)
    run_plan("lstm", nodes=8, gpus_per_node=1, bandwidth="1gbit", device="h100", systems=["ddp", "safusion", "gtopk"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Device: H100" in printed
    assert "its work is counted" in printed
    assert "do not compress there" in printed
    rows = plan_table(Job(resolve_trace("lstm"), Cluster(8, 1, LINKS["1gbit"])), ["safusion", "gtopk", "ddp"])
    assert [row.counted for row in rows] == [True, False, True]
    assert rows[2].device_s == 0 < rows[0].device_s


def test_planners_begin_with_counted_costs() -> None:
    cost = Job(resolve_trace("bert-large"), Cluster(8), 0.01).select_cost
    assert NOMINAL_SELECTION.fixed == pytest.approx(cost.fixed, rel=0.1)
    assert NOMINAL_SELECTION.per_element == pytest.approx(cost.per_element, rel=0.1)


def test_a_quarter_of_all_elements_is_a_bitmap_which_no_kernel_writes() -> None:
    job = bert_large("25gbit", 4, 1)

    def decoding(density: float) -> float:
        return sum(each.decode for each in build_schedule("saf-pooled", replace(job, density=density)).messages)

    assert decoding(0.3) > 1.2 * 1.5 * decoding(0.2)  # there are half as many entries more
