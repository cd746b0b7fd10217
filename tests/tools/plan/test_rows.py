"""Rows with options: the same as a system with these parts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.comm.cost import LINKS
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.paths import TorchOperations
from lightning_safusion.tools.plan.report import run_plan
from lightning_safusion.tools.plan.rows import simulated_row
from lightning_safusion.tools.plan.systems import build_schedule, is_counted, run_system
from lightning_safusion.tools.plan.traces import resolve_trace


@cache
def bert(nodes: int = 8, gpus: int = 1, rate: str = "10gbit") -> Job:
    return Job(resolve_trace("bert-base"), Cluster(nodes, gpus, LINKS[rate]), 0.02)


@pytest.mark.parametrize(
    ("row", "system"),
    [
        ("safusion[wire=q4,quota=auto,select_by=auto,dense_below=0]", "saf-pooled"),
        ("saf-pooled[quota=proportional,wire=auto,select_by=gradient,dense_below=512]", "safusion"),
        ("safusion[fusion=aligned,collective=allgather,dense_below=0]", "saf-inter"),
        ("safusion[fusion=behind,collective=allgather]", "behind"),
        ("behind[fusion=adaptive]", "fgbuff"),
        ("fgbuff[fusion=single]", "syncea"),
        ("syncea[collective=gtopk]", "gtopk"),
        ("gtopk[collective=oktopk,compressor=oktopk]", "oktopk"),
        ("saf-inter[fusion=naive,compressor=gaussiank]", "saf-naive"),
        ("wfbp[compressor=none,collective=allreduce]", "wfbp-dense"),
        ("wfbp-dense[fusion=mgwfbp]", "mgwfbp"),
        ("wfbp[fusion=horovod]", "horovod"),
        ("horovod[collective=allreduce]", "horovod-dense"),
        ("horovod[fusion=cupcake,scope=group]", "cupcake"),
        ("ssfusion[offload=false]", "ssfusion-i"),
        ("ssfusion-i[collective=allgather,offload=true]", "ssfusion-o"),
        ("safusion[fusion=hipress,dense_below=0]", "hipress"),
        ("saf-pooled[collective=allgather]", "saf-pooled[collective=allgather,select_by=update]"),
    ],
)
def test_a_row_with_the_parts_of_a_system_takes_what_the_system_takes(row: str, system: str) -> None:
    for shape in ((3, 1), (2, 8)):
        assert run_system(row, bert(*shape), 1) == run_system(system, bert(*shape), 1)
    assert is_counted(row) == is_counted(system)


def test_every_system_is_a_row() -> None:
    for name, system in SYSTEMS.items():
        row = simulated_row(name)
        assert (row.name, row.parts.system, row.options) == (name, system, {})
        assert row.sparse == system.sparse
    assert not simulated_row("safusion[collective=allreduce]").sparse


def test_a_row_may_have_a_density_of_its_own() -> None:
    dense = replace(bert(), density=0.1)
    assert run_system("saf-pooled[density=0.1]", bert(), 1) == run_system("saf-pooled", dense, 1)
    assert run_system("saf-pooled[density=0.02]", dense, 1) == run_system("saf-pooled", bert(), 1)


@pytest.mark.parametrize(("wire", "bits"), [("q2", 2), ("q4", 4), ("bf16", 16), ("fp32", 32)])
def test_values_have_the_bits_of_the_row(wire: str, bits: int) -> None:
    job = bert()
    per_entry = run_system(f"saf-pooled[wire={wire},collective=allgather]", job, 1).nbytes / (7 * job.entries.sum())
    # positions of two elements in a hundred: log2(50) bits and two more; a scale for some values of a few bits
    assert 8 * per_entry == pytest.approx(bits + 7.6, abs=0.6)


@pytest.mark.parametrize("collective", ["sharded", "hierarchical", "hierarchical-sharded"])
def test_exchanges_in_phases_have_the_buffers_of_the_rows_policy(collective: str) -> None:
    job = bert(2, 8)
    for fusion, buffers in (("single", 1), ("wfbp", len(job.numels))):
        schedule = build_schedule(f"saf-pooled[collective={collective},fusion={fusion}]", job)
        assert len(schedule.messages) == buffers


def test_shards_without_fused_kernels_are_charged_both_phases() -> None:
    job = bert()
    elements, entries = float(job.numels.sum()), float(job.entries.sum())
    (message,) = build_schedule("syncea[collective=sharded]", job).messages
    # an owner selects from its eighth; half a message was scattered, and three and a half are gathered
    path, device = TorchOperations(), job.cluster.device
    shard = device.seconds(path.selection(job.span(elements / 8)))
    read = device.seconds(path.decoding(job.span(elements, entries, len(job.numels)), 4))
    assert message.decode == pytest.approx(shard + read, rel=0.01)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("saf-poled", "unknown system 'saf-poled'.*Did you mean 'saf-pooled'"),
        (
            "saf-pooled[memory=none]",
            "unknown option 'memory'. Choose one of 'density', 'compressor', 'fusion', 'scope'",
        ),
        ("omgs[density=2]", r"row 'omgs\[density=2\]': density must be in"),
        ("safusion[fusion=aligned[tensors_per_buffer=3]]", "parts are simulated without options of their own"),
        ("ddp-bf16[density=0.1]", "row 'ddp-bf16.*': system='ddp-bf16' works without the engine: it has no"),
    ],
)
def test_unknown_options_and_values_are_named_before_any_work(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated_row(row)
    with pytest.raises(ValueError, match=message):
        run_plan("there is no such trace", systems=["ddp", row])


@pytest.mark.parametrize(
    ("system", "options"),
    [
        ("ddp", {"wire": "q4"}),
        ("saf-pooled", {"quota": "pooled", "collective": "sharded"}),
        ("safusion", {"wire": "q4", "collective": "oktopk"}),
        ("saf-naive", {"scope": "group"}),
    ],
)
def test_what_the_strategy_refuses_is_refused_in_its_words(system: str, options: dict[str, Any]) -> None:
    with pytest.raises((MisconfigurationException, ValueError)) as refused:
        SAFusionStrategy(system=system, **options)
    row = f"{system}[{','.join(f'{name}={value}' for name, value in options.items())}]"
    with pytest.raises(ValueError, match="^row") as error:
        simulated_row(row)
    assert str(error.value) == f"row {row!r}: {refused.value}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("safusion[offload=true]", "offload=True is simulated only with fusion='selective', got fusion='adaptive'"),
        ("ssfusion-i[collective=sharded]", "only with collective='allgather' or 'hybrid', got collective='sharded'"),
        ("adtopk[dense_below=100]", "only with dense_below=0, got dense_below=100"),
    ],
)
def test_parts_that_a_schedule_would_not_look_at_are_refused(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated_row(row)
