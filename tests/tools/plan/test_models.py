"""Models that are sharded inside of nodes: what a worker exchanges, which rows there are, and what is said of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_safusion import SAFusionModelParallelStrategy
from lightning_safusion.comm.cost import Link
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.systems import SHARDED_ROWS, SYSTEMS, HookSystem
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.comparison import plan_table, recommend, sweep_table, when_to_compress
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.models import SHARDED, sharded_job, sharded_trace
from lightning_safusion.tools.plan.report import run_plan
from lightning_safusion.tools.plan.rows import simulated_row
from lightning_safusion.tools.plan.systems import run_system
from lightning_safusion.tools.plan.traces import resolve_trace
from tests.tools.plan.test_calibration import COSTS, ON_DEVICES

# no seconds but those of bytes on the card
LINK = Link(alpha=0.0, beta=1e-9)
SHAPES = ((64, 100), (32,), (256, 50), (16, 3, 3, 3))
TRACE = Trace("job", tuple(TraceTensor(f"t{i}", shape, 0.01, 0.004) for i, shape in enumerate(SHAPES)), 0.005)
ROWS = ["hsdp", "hsdp-bf16", "saf-hsdp"]
SHARDS: dict[str, Any] = {"sharded": True, "systems": ROWS}


def whole(nodes: int = 4, gpus: int = 8, trace: Trace = TRACE, density: float = 0.02) -> Job:
    return Job(trace, Cluster(nodes, gpus, LINK), density)


def test_shards_have_rows_of_the_first_dimension_rounded_up() -> None:
    shapes = {(): (1,), (1,): (1,), (9,): (3,), (12, 5): (3, 5), (2, 7): (1, 7), (0, 4): (0, 4)}
    given = replace(TRACE, tensors=tuple(TraceTensor("t", shape, 0.01, 0.004) for shape in shapes))
    cut = sharded_trace(given, 4)
    assert [tensor.shape for tensor in cut.tensors] == list(shapes.values())
    assert cut.seconds == given.seconds


@pytest.mark.parametrize(("row", "width"), [("hsdp", 4), ("hsdp-bf16", 2)])
def test_all_shards_together_take_the_card_as_long_as_a_ring_of_nodes(row: str, width: int) -> None:
    job, numel = sharded_job(whole()), sum(TRACE.numels)
    volume = 2 * 3 / 4 * width * numel
    sent = run_system(row, job)
    assert sent.nbytes == pytest.approx(volume / 8)
    assert sent.node_bytes == pytest.approx(volume)
    assert sent.compute == TRACE.seconds
    # with nothing to hide behind, each second of the card is one of the step
    at_once = replace(TRACE, tensors=tuple(replace(each, backward=0.0) for each in TRACE.tensors))
    assert run_system(row, sharded_job(whole(trace=at_once))).exposed == pytest.approx(volume * LINK.beta)


def test_a_worker_selects_from_its_shard_and_gathers_from_other_nodes() -> None:
    row = "saf-hsdp[collective=allgather,fusion=single]"
    job = sharded_job(whole(density=0.125))
    shard = Job(sharded_trace(TRACE, 8), Cluster(4, 1, replace(LINK, beta=8 * LINK.beta)), 0.125)
    assert job.numels.sum() * 8 == sum(TRACE.numels)
    mine, alone = run_system(row, job), run_system(row, shard)
    assert replace(mine, node_bytes=0) == replace(alone, node_bytes=0)
    assert mine.node_bytes == 8 * alone.node_bytes == 8 * mine.nbytes


@pytest.mark.parametrize("name", SHARDED.compared)
def test_one_worker_in_a_node_exchanges_what_it_did_without_shards(name: str) -> None:
    job = Job(resolve_trace("lstm"), Cluster(4, 1), 0.02)
    head, bracket, options = name.partition("[")
    system = SHARDED_ROWS.get(head, head) + bracket + options
    assert run_system(name, sharded_job(job), 1) == run_system(system, job, 1)


def test_all_systems_that_can_exchange_shards_are_compared() -> None:
    engine = {name for name, system in SYSTEMS.items() if not isinstance(system, HookSystem)}
    assert {simulated_row(name).parts.system.name for name in SHARDED.compared} == engine | {"ddp", "ddp-bf16"}
    assert SHARDED.compared[:3] == tuple(ROWS)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("powersgd", "works in DDP, .* 'hsdp' in fp32, 'hsdp-bf16' in bf16"),
        ("saf-hsdp[collective=hierarchical-sharded]", "leave out collective='hierarchical-sharded'"),
        ("saf-hsdp[wire=q9]", "unknown wire format 'q9'"),
        ("hsdp[wire=q2]", "it has no wire"),
    ],
)
def test_rows_that_cannot_exchange_shards_are_refused_before_any_work(row: str, words: str) -> None:
    refused = re.escape(f"row {row!r}") + f":? .*{words}"
    with pytest.raises(ValueError, match=refused):
        plan_table(sharded_job(whole()), ["hsdp", row])
    with pytest.raises(ValueError, match=refused):
        run_plan("there is no such trace", sharded=True, systems=["hsdp", row])


def test_rows_of_shards_are_refused_elsewhere_with_the_way_that_works() -> None:
    row = "saf-hsdp[density=0.1]"
    with pytest.raises(ValueError, match=r"add --sharded true, or name 'saf-pooled'"):
        run_plan("there is no such trace", systems=[row])
    with pytest.raises(ValueError, match="--sharded true"):
        plan_table(whole(), [row])


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ("saf-hsdp", {"system": "saf-pooled", "density": 0.02}),
        ("saf-hsdp[wire=q2,density=0.1]", {"system": "saf-pooled", "density": 0.1, "wire": "q2"}),
        ("safusion[dense_below=64]", {"system": "safusion", "density": 0.02, "dense_below": 64}),
    ],
)
def test_settings_are_those_of_the_strategy_that_shards(row: str, given: dict[str, Any]) -> None:
    job = sharded_job(Job(resolve_trace("lstm"), Cluster(4, 8), 0.02))
    rows = plan_table(job, ["hsdp-bf16", row])
    sentences, settings = recommend(rows, job.density, "AdamW", job.cluster.workers, SHARDED)
    assert f"{row!r} takes" in sentences[0]
    assert "models that are whole on every worker" in sentences[1]
    said = " ".join([*sentences, when_to_compress(rows, job)])
    assert "HSDP in bf16" in said
    assert not re.search(r"\bDDP\b", said)
    strategy = settings["trainer"]["strategy"]
    assert strategy == {"class_path": "lightning_safusion.SAFusionModelParallelStrategy", "init_args": given}
    assert SAFusionModelParallelStrategy(**given).system == given["system"]


def test_where_dense_is_better_the_settings_are_those_of_a_dense_exchange() -> None:
    job = sharded_job(whole(density=1.0))
    (verdict,), settings = recommend(plan_table(job, [*ROWS, "mgwfbp"]), 1.0, "AdamW", models=SHARDED)
    assert verdict.startswith("Dense HSDP is the better choice here")
    given = settings["trainer"]["strategy"]["init_args"]
    assert SAFusionModelParallelStrategy(**given).system == "hsdp-bf16"
    (verdict,), _ = recommend(plan_table(job, ["hsdp"]), 1.0, "AdamW", models=SHARDED)
    assert "add 'saf-hsdp'" in verdict


def test_faster_dense_rows_have_the_gradients_of_hsdp() -> None:
    best, other, own = plan_table(
        sharded_job(Job(resolve_trace("lstm"), Cluster(4, 8))), ["saf-hsdp", "mgwfbp", "hsdp"]
    )
    rows = [best, replace(other, iteration_s=best.iteration_s / 2), replace(own, iteration_s=best.iteration_s / 2)]
    for sentence in recommend(rows, 0.02, "AdamW", models=SHARDED)[0][2:]:
        assert sentence.endswith("with the gradients of HSDP: try it first.")


def test_a_point_of_a_sweep_is_the_job_on_that_cluster() -> None:
    over = {"bandwidth": ["1gbit", "10gbit"], "nodes": ["2", "4"], "density": ["0.02", "0.1"]}
    records = sweep_table(sharded_job(whole()), ROWS, over=over)
    assert len(records) == 2 * 2 * 2 * len(ROWS)
    for record in records:
        cluster = Cluster(record["nodes"], 8, resolve_link(record["bandwidth"]))
        (row,) = plan_table(sharded_job(Job(TRACE, cluster, record["density"])), [record["system"]])
        head = {"workers": 8 * cluster.nodes, "gbit": cluster.inter.card_gbit}
        assert record == record | asdict(row) | head


def test_a_card_takes_the_messages_of_other_machines() -> None:
    # of four workers on two machines each receives three messages, and a machine two
    costs = replace(ON_DEVICES, nodes=2, per_node=2)
    assert costs.card.beta == pytest.approx(costs.link.beta * 3 / 2)
    job = sharded_job(Job(TRACE, Cluster.calibrated(costs, 2, 2)), costs)
    assert job.cluster.measured == {}
    assert job.cluster.share.beta == pytest.approx(3 * costs.link.beta)
    alone = replace(ON_DEVICES, nodes=4, per_node=1)
    job = sharded_job(Job(TRACE, Cluster.calibrated(alone, 4, 1)), alone)
    assert (job.cluster.inter, set(job.cluster.measured)) == (alone.link, {"allgather", "allreduce"})


@pytest.mark.parametrize("costs", [COSTS, ON_DEVICES])
def test_a_calibration_needs_a_link_between_machines(costs: Calibration, plan: Callable[..., str]) -> None:
    place: dict[str, Any] = {"nodes": 2, "gpus_per_node": 2}
    with pytest.raises(ValueError, match=r"does not say on how many machines its 4 workers were; write a new one"):
        plan(costs, **SHARDS, **place)
    with pytest.raises(ValueError, match=r"its 4 workers were on one machine.*give --bandwidth"):
        plan(replace(costs, nodes=1, per_node=4), **SHARDS, **place)
    printed = plan(replace(costs, nodes=2, per_node=2), **SHARDS)
    assert "2 x 2 workers (nodes and workers of a node as in costs.json)" in printed
    assert "Each worker counts as a node" not in printed


def test_the_command_prints_and_writes_what_is_said_of_shards(plan: Callable[..., str]) -> None:
    printed = plan(**SHARDS, nodes=2, gpus_per_node=4, sweep="bandwidth=1gbit,10gbit", output="out")
    assert "lstm: 37.3 M parameters in 11 tensors" in printed
    assert "2 x 4 workers at 25gbit; sharded inside of nodes;" in printed
    assert "What FSDP2 exchanges inside of nodes counts as part of them." in printed
    assert "class_path: lightning_safusion.SAFusionModelParallelStrategy" in printed
    assert "ms HSDP" in printed
    assert not re.search(r"\bDDP\b", printed)
    assert [row["system"] for row in json.loads(Path("out/plan.json").read_text())] == ROWS
    assert "SAFusionModelParallelStrategy" in Path("out/settings.yaml").read_text()
