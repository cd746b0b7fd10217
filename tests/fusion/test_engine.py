"""The engine with all of its parts: nothing lost, replicas equal, nothing missing.

Covers: conservation for every sparsifier, memory, wire and collective on 1, 2, 3 and 5 workers; bitwise equal replicas;
    the mean at density 1; grouping changes no number; tensors missing ahead and behind; the naive system against the
    aligned one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_safusion.comm import available_wires
from lightning_safusion.sparsify import DenseStart, DGCMemory, ResidualMemory, available_sparsifiers
from tests.cluster import Cluster, assert_conserved, conserved, settings, specs
from tests.quick import slow

STEPS = 4
#: Uneven, one element, empty.
SHAPES = ((40, 30), (40,), (1,), (0,), (90, 70), (7, 11))


#: Collectives and workers, in turn.
JOBS = (("allgather", 2), ("auto", 3), ("hybrid", 3), ("allgather", 5), ("allgather", 1))


def test_nothing_is_lost_by_any_sparsifier_nor_on_any_wire(make: Callable[..., Cluster]) -> None:
    """Each sparsifier, job, layout and kind of values at least once, and every third time some tensors are dense."""
    names, wires = available_sparsifiers(), available_wires()
    for i in range(12):
        collective, world_size = JOBS[i % len(JOBS)]
        parts = {"compressor": names[i % len(names)], "wire": wires[7 * i % len(wires)], "collective": collective}
        cluster = make(world_size, specs(SHAPES, dense=(1, 4) if i % 3 == 0 else ()), **parts)
        assert_conserved(cluster, 3)
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["q4", "q2", "bitmap-sign"])
@pytest.mark.parametrize("options", [{"quota": "pooled", "density": 0.5}, {"quota": "shared"}])
def test_nothing_is_lost_in_a_few_bits(make: Callable[..., Cluster], wire: str, options: dict[str, Any]) -> None:
    assert_conserved(make(3, **({"tensors": specs(dense=(1, 4)), "wire": wire, "collective": "allgather"} | options)))


@pytest.mark.parametrize("options", [{"collective": "oktopk"}, {"collective": "gtopk"}, {"fusion": "naive"}])
def test_few_bits_need_messages_to_all(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wire='q2' rounds so much"):
        settings(wire="q2", **options)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", available_sparsifiers())
def test_nothing_is_lost_in_any_combination(make: Callable[..., Cluster], compressor: str) -> None:
    """Every sparsifier with every wire, and jobs in turn: the memory conserves."""
    for wire, (collective, world_size) in zip(available_wires(), itertools.cycle(JOBS), strict=False):
        cluster = make(world_size, tensors=specs(SHAPES), compressor=compressor, wire=wire, collective=collective)
        assert_conserved(cluster, 3)
        cluster.close()


GROUPINGS = [
    (fusion, scope, quota)
    for fusion in ("wfbp", "single", "aligned", "adaptive", "naive")
    for scope, quota in (
        ("tensor", "proportional"),
        ("tensor", "pooled"),
        ("tensor", "shared"),
        ("group", "proportional"),
    )
    # refused: a buffer that is filled with selected elements, and tensors that compete where there are none
    if scope == "tensor" or (fusion != "naive" and quota == "proportional")
]


#: Each of fusions, scopes and quotas.
FEW = [("wfbp", "tensor", "shared"), ("single", "group", "proportional"), ("adaptive", "tensor", "pooled")]
FEW += [("naive", "tensor", "proportional"), ("aligned", "tensor", "pooled")]


@pytest.mark.parametrize(("fusion", "scope", "quota"), [*FEW, *slow(each for each in GROUPINGS if each not in FEW)])
def test_nothing_is_lost_by_any_grouping(make: Callable[..., Cluster], fusion: str, scope: str, quota: str) -> None:
    compressor = "sidco" if fusion in ("single", "adaptive") else "topk"
    parts = {"compressor": compressor, "fusion": fusion, "scope": scope, "quota": quota, "collective": "allgather"}
    assert_conserved(make(3, tensors=specs(SHAPES), **parts))


def test_nothing_is_lost_when_dense_steps_and_sparse_ones_alternate(make: Callable[..., Cluster]) -> None:
    assert_conserved(make(2, density=DenseStart(0.05, 3)))
    assert_conserved(make(2, tensors=specs(dense=(0, 4, 7)), collective="allgather", wire="bf16"))


@pytest.mark.parametrize("memory", ["none", "dgc", ResidualMemory(decay=0.9)])
def test_memories_that_do_not_conserve_say_so(make: Callable[..., Cluster], memory: Any) -> None:
    cluster = make(2, memory=memory) if isinstance(memory, str) else make(2, memory=ResidualMemory(0.9))
    assert not cluster.settings[0].memory.conserves
    done, given = conserved(cluster)
    assert any((a - b).abs().max() > 0.01 * b.abs().max() for a, b in zip(done, given, strict=True) if b.numel())


def test_the_residual_says_that_it_conserves(make: Callable[..., Cluster]) -> None:
    assert make(1).settings[0].memory.conserves


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("collective", ["allgather", "auto"])
def test_half_precision_gradients_lose_only_what_their_own_sum_rounds(
    make: Callable[..., Cluster], dtype: torch.dtype, collective: str
) -> None:
    cluster = make(2, tensors=specs(dtype=dtype), collective=collective)
    done, given = conserved(cluster)
    for a, b in zip(done, given, strict=True):
        # the sparse path returns every rounding to the residual; a dense all-reduce rounds its own sum, as DDP does
        tolerance = 1e-5 if collective == "allgather" else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()) if b.numel() else 0.0)


@pytest.mark.parametrize(("collective", "world_size"), [("auto", 5), ("allgather", 3), ("allreduce", 2)])
def test_density_1_gives_the_mean(make: Callable[..., Cluster], collective: str, world_size: int) -> None:
    cluster = make(world_size, density=1.0, collective=collective)
    for step in range(3):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for i in range(len(cluster.specs)):
            wanted = sum(grads[rank][i] / world_size for rank in range(world_size))
            largest = max(float(grads[rank][i].abs().max()) if wanted.numel() else 0.0 for rank in range(world_size))
            torch.testing.assert_close(means[0][i], wanted, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("compressor", ["gaussiank", *slow(("topk", "randomk", "dgc"))])
def test_grouping_alone_changes_no_number(make: Callable[..., Cluster], compressor: str) -> None:
    results = []
    for fusion in ("wfbp", "aligned", "single", "naive"):
        cluster = make(2, specs(SHAPES), compressor=compressor, fusion=fusion, collective="allgather")
        results.append([cluster.step(cluster.random_grads(step))[0] for step in range(STEPS)])
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    "compressor", ["topk", "sidco", *slow(sorted({*available_sparsifiers()} - {"none", "topk", "sidco"}))]
)
def test_no_tensor_is_missing_ahead_of_fusion_and_some_are_behind(
    make: Callable[..., Cluster], compressor: str
) -> None:
    missing = {}
    for scope in ("tensor", "group"):
        cluster = make(2, compressor=compressor, scope=scope, fusion="single", collective="allgather", density=0.01)
        reports = []
        for step in range(STEPS):
            cluster.step(cluster.random_grads(step))
            reports.append(cluster.engines[1].record.as_dict())
        missing[scope] = sum(r["tensors_missing"] for r in reports)
    assert missing["tensor"] == 0
    if compressor not in ("randomk", "adtopk"):  # uniform over a buffer, or over its rows: not by magnitude
        assert missing["group"] > 0


def test_naive_workers_fill_buffers_at_their_own_pace_and_agree(make: Callable[..., Cluster]) -> None:
    from lightning_safusion.fusion.plans.policy import Naive

    # an estimator whose counts differ between workers, and buffers so small that the workers need different numbers of
    # them
    cluster = make(3, compressor="gaussiank", fusion=Naive(buffer_elements=100), collective="allgather", density=0.02)
    for step in range(2):
        cluster.step(cluster.random_grads(step))
    uneven = [
        [(g * (1.0 if rank else 0.0) + (torch.arange(len(g)) == 0) * 1.0) for g in grads]
        for rank, grads in enumerate(cluster.random_grads(7))
    ]
    means = cluster.step(uneven)
    assert all(torch.equal(a, b) for rank in (1, 2) for a, b in zip(means[0], means[rank], strict=True))
    assert_conserved(make(3, compressor="gaussiank", fusion=Naive(buffer_elements=100), collective="allgather"))


def test_bytes_per_kept_element_with_bf16_values(make: Callable[..., Cluster]) -> None:
    shapes = ((768, 768), (768,), (1024, 768), (3072,), (768,))
    for compressor in ("topk", "gaussiank"):
        cluster = make(
            1, tensors=specs(shapes), compressor=compressor, density=0.01, wire="bf16", collective="allgather"
        )
        for step in range(3):
            cluster.step(cluster.random_grads(step))
        buffers = cluster.engines[0].record.events.buffers
        slots = sum(buffer.capacity for buffer in buffers)
        assert sum(buffer.bytes_sent for buffer in buffers) / slots <= 4.5


def test_dgc_memory_at_density_1_is_momentum_sgd(make: Callable[..., Cluster]) -> None:
    cluster = Cluster(2, lambda: settings(density=1.0, memory=DGCMemory(momentum=0.9)))
    momentum = [torch.zeros(s.numel) for s in cluster.specs]
    for step in range(4):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for i, buffer in enumerate(momentum):
            buffer.mul_(0.9).add_((grads[0][i] + grads[1][i]) / 2)
            torch.testing.assert_close(means[0][i], buffer, rtol=1e-5, atol=1e-5)
    cluster.close()


@pytest.mark.parametrize(
    "options",
    [
        {"compressor": "gaussiank", "wire": "bf16"},
        {"tensors": specs(SHAPES, dtype=torch.bfloat16), "quota": "pooled"},
        {"tensors": specs(SHAPES, dense=(0, 4)), "density": DenseStart(0.05, 3)},
        {"fusion": "naive"},
        *slow([{"compressor": "oktopk", "collective": "oktopk"}]),
    ],
)
def test_ef21_gives_all_workers_the_mean_of_what_they_have_sent(make: Callable[..., Cluster], options: Any) -> None:
    cluster = make(3, **({"memory": "ef21", "collective": "allgather", "tensors": specs(SHAPES)} | options))
    for step in range(STEPS):
        means = cluster.step(cluster.random_grads(step))
        states = [each.memory.state_dict() for each in cluster.settings]
        own = torch.stack([state["average"].double() - state["difference"].double() for state in states])
        limit = 1e-5 * float(own.abs().max())
        for state, mine in zip(states, means, strict=True):
            torch.testing.assert_close(state["estimate"].double(), own.mean(dim=0), rtol=0, atol=limit)
            given = torch.cat([mine[spec.index] for spec in cluster.engines[0].space.layout.specs])
            assert torch.equal(given, state["estimate"].to(given.dtype))


def test_ef21_at_density_1_is_the_mean_of_moving_averages(make: Callable[..., Cluster]) -> None:
    cluster = make(2, density=1.0, memory="ef21")
    averages = [torch.zeros(s.numel) for s in cluster.specs]
    for step in range(4):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for i, average in enumerate(averages):
            average.lerp_((grads[0][i] + grads[1][i]) / 2, 0.2 if step else 1.0)
            torch.testing.assert_close(means[0][i], average, rtol=1e-5, atol=1e-5)


def test_ef21_does_not_learn_from_a_window_that_ended_badly(make: Callable[..., Cluster]) -> None:
    cluster = make(2, memory="ef21", collective="allgather")
    cluster.step(cluster.random_grads(0))
    before = [each.memory.state_dict()["estimate"].clone() for each in cluster.settings]
    spoiled = cluster.random_grads(1)
    spoiled[1][0][3] = torch.inf
    assert cluster.step(spoiled)[0][0].isnan().any()
    for held, each in zip(before, cluster.settings, strict=True):
        assert torch.equal(held, each.memory.state_dict()["estimate"])
    assert all(mean.isfinite().all() for mean in cluster.step(cluster.random_grads(2))[0])


def test_the_first_window_of_ef21_is_sparse(make: Callable[..., Cluster]) -> None:
    """A dense first gradient would stay in EF21's estimate for long; a residual keeps nothing of it."""
    densities = {}
    for memory in ("ef21", "residual"):
        cluster = make(2, memory=memory, collective="auto", density=0.05)
        cluster.step(cluster.random_grads(0))
        report = cluster.engines[0].record
        assert report is not None
        densities[memory] = report.as_dict()["achieved_density"]
    assert densities["ef21"] < 0.06
    assert densities["residual"] == 1


def test_ef21_at_density_1_has_nothing_to_select_in_its_first_window(make: Callable[..., Cluster]) -> None:
    cluster = make(2, memory="ef21", collective="auto", density=1.0)
    cluster.step(cluster.random_grads(0))
    report = cluster.engines[0].record
    assert report is not None
    assert [buffer.collective for buffer in report.events.buffers] == ["allreduce"]


def test_the_first_window_is_averaged_in_place(make: Callable[..., Cluster]) -> None:
    cluster = make(2, collective="auto", density=0.05)
    grads = cluster.random_grads(0)
    count = len(cluster.specs)
    fresh = [[True] * count, [True] * count]
    fresh[0][1] = False  # on one rank only
    fresh[0][2] = fresh[1][2] = False  # on none
    means = cluster.step(grads, fresh)
    for index in range(count):
        mine, theirs = grads[0][index], grads[1][index]
        for rank in range(2):
            expected = (mine + theirs) / 2 if index > 2 or index == 0 else theirs / 2 if index == 1 else grads[rank][2]
            torch.testing.assert_close(means[rank][index], expected)
            assert not cluster.residual(rank, index).any()
    engine = cluster.engines[0]
    assert len(engine.space.buffers) == 0
    assert engine.record is not None
    report = engine.record.as_dict()
    sent = sum(s.numel * s.dtype.itemsize for s in cluster.specs if s.index not in (1, 2))
    assert (report["bytes_sent"], report["tensors_missing"]) == (sent, 0)


def test_decoupled_momentum_is_never_dense(make: Callable[..., Cluster]) -> None:
    collectives = {}
    for memory in ("decoupled", "residual"):
        cluster = make(2, memory=memory, collective="auto", density=1.0)
        for step in range(4):
            cluster.step(cluster.random_grads(step))
        plan = cluster.engines[0].planner.current
        assert plan is not None
        collectives[memory] = {group.collective for group in plan.groups}
    assert collectives == {"decoupled": {"allgather"}, "residual": {"allreduce"}}


def test_ef21_and_a_tree_that_loses_mass_are_refused() -> None:
    with pytest.raises(ValueError, match="memory='ef21' sums all that is sent"):
        settings(memory="ef21", collective="gtopk")


@pytest.mark.parametrize(("compressor", "world_size"), [("topk", 3), *slow([("oktopk", 2)])])
def test_nothing_is_lost_by_the_sparse_all_reduce(
    make: Callable[..., Cluster], compressor: str, world_size: int
) -> None:
    assert_conserved(make(world_size, compressor=compressor, collective="oktopk", fusion="single", scope="group"))
    assert_conserved(make(world_size, compressor=compressor, collective="oktopk"))


def test_the_tree_loses_mass_from_three_workers_on(make: Callable[..., Cluster]) -> None:
    assert_conserved(make(2, collective="gtopk", fusion="single", scope="group"))
    with pytest.raises(AssertionError):
        assert_conserved(make(3, collective="gtopk", fusion="single", scope="group"))
