"""The engine with all of its parts: nothing lost, replicas equal, nothing missing."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from lightning_safusion.comm.wire.formats import available_wires, resolve_codec
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import Naive
from lightning_safusion.sparsify import DenseStart, ResidualMemory, available_sparsifiers
from tests.cluster import assert_conserved, conserved, settings, specs
from tests.fusion.windows import Make, finite, flat, random_window, train
from tests.models import equal
from tests.quick import slow

STEPS = 4
#: Uneven, one element, empty.
SHAPES = ((40, 30), (40,), (1,), (0,), (90, 70), (7, 11))
SPARSIFIERS, WIRES = available_sparsifiers(), available_wires()
#: Collectives and workers, in turn.
JOBS = (("allgather", 2), ("auto", 3), ("hybrid", 3), ("allgather", 5), ("allgather", 1))


#: Each sparsifier, job, layout and kind of values at least once; and every sparsifier with every wire, by sparsifier.
FEW_PAIRS = [(SPARSIFIERS[i % len(SPARSIFIERS)], WIRES[7 * i % len(WIRES)]) for i in range(12)]
ALL_PAIRS = [[(sparsifier, wire) for wire in WIRES] for sparsifier in SPARSIFIERS]


@pytest.mark.parametrize("pairs", [FEW_PAIRS, *slow(ALL_PAIRS)], ids=lambda pairs: pairs[0][0])
def test_nothing_is_lost_by_any_sparsifier_nor_on_any_wire(make: Make, pairs: list[tuple[str, str]]) -> None:
    """Jobs in turn; every third time some tensors are dense."""
    for i, (compressor, wire) in enumerate(pairs):
        collective, world_size = JOBS[i % len(JOBS)]
        tensors = specs(SHAPES, dense=(1, 4) if i % 3 == 0 else ())
        cluster = make(world_size, tensors, compressor=compressor, wire=wire, collective=collective)
        assert_conserved(cluster, 3)
        cluster.close()


GROUPED = {"tensors": specs(SHAPES)}
OKTOPK = {"collective": "oktopk", "fusion": "single", "scope": "group"}
CONSERVING: list[dict[str, Any]] = [
    # each of fusions, scopes and quotas; any of their combinations: test_machine
    GROUPED | {"fusion": "wfbp", "quota": "shared"},
    GROUPED | {"fusion": "single", "compressor": "sidco", "scope": "group"},
    GROUPED | {"fusion": "adaptive", "compressor": "sidco", "quota": "pooled"},
    GROUPED | {"fusion": "naive"},
    GROUPED | {"fusion": "aligned", "quota": "pooled"},
    {"world_size": 2, "density": DenseStart(0.05, 3), "collective": "auto"},
    {"world_size": 2, "tensors": specs(dense=(0, 4, 7)), "wire": "bf16"},
    {"collective": "oktopk"},
    OKTOPK,
    {"compressor": "gaussiank", "fusion": Naive(buffer_elements=100)},
]
MORE_CONSERVING: list[dict[str, Any]] = [
    *({"tensors": specs(dense=(1, 4)), "wire": wire, "quota": "shared"} for wire in ("q4", "q2", "bitmap-sign")),
    *({"wire": wire, "quota": "pooled", "density": 0.5} for wire in ("q4", "q2", "bitmap-sign")),
    {"world_size": 2, "compressor": "oktopk", "collective": "oktopk"},
    {"world_size": 2, "compressor": "oktopk"} | OKTOPK,
]


def named(options: dict[str, Any]) -> str:
    return ",".join(str(value) if isinstance(value, (str, int, float)) else key for key, value in options.items())


@pytest.mark.parametrize("options", [*CONSERVING, *slow(MORE_CONSERVING)], ids=named)
def test_nothing_is_lost(make: Make, options: dict[str, Any]) -> None:
    assert_conserved(make(**({"world_size": 3, "collective": "allgather"} | options)))


@pytest.mark.parametrize("memory", ["none", "dgc", ResidualMemory(decay=0.9)])
def test_memories_that_do_not_conserve_say_so(make: Make, memory: Any) -> None:
    cluster = make(1, memory=memory)
    assert not cluster.settings[0].memory.conserves
    done, given = conserved(cluster)
    assert any((a - b).abs().max() > 0.01 * b.abs().max() for a, b in zip(done, given, strict=True) if b.numel())
    assert make(1).settings[0].memory.conserves


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("collective", ["allgather", "auto"])
def test_half_precision_gradients_lose_only_what_their_own_sum_rounds(
    make: Make, dtype: torch.dtype, collective: str
) -> None:
    cluster = make(2, tensors=specs(dtype=dtype), collective=collective)
    done, given = conserved(cluster)
    for a, b in zip(done, given, strict=True):
        # the sparse path returns every rounding to the residual; a dense all-reduce rounds its own sum, as DDP does
        tolerance = 1e-5 if collective == "allgather" else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()) if b.numel() else 0.0)


@pytest.mark.parametrize(("collective", "world_size"), [("auto", 5), ("allgather", 3), ("allreduce", 2)])
def test_density_1_gives_the_mean(make: Make, collective: str, world_size: int) -> None:
    cluster = make(world_size, density=1.0, collective=collective)
    for step in range(3):
        grads = cluster.random_grads(step)
        means = cluster.step(grads)
        for i in range(len(cluster.specs)):
            wanted = sum(grads[rank][i] / world_size for rank in range(world_size))
            largest = max(float(grads[rank][i].abs().max()) if wanted.numel() else 0.0 for rank in range(world_size))
            torch.testing.assert_close(means[0][i], wanted, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("compressor", ["gaussiank", *slow(("topk", "randomk", "dgc"))])
def test_grouping_alone_changes_no_number(make: Make, compressor: str) -> None:
    results = []
    for fusion in ("wfbp", "aligned", "single", "naive"):
        cluster = make(2, specs(SHAPES), compressor=compressor, fusion=fusion, collective="allgather")
        results.append([random_window(cluster, step)[0] for step in range(STEPS)])
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    "compressor", ["topk", "sidco", *slow(sorted({*available_sparsifiers()} - {"none", "topk", "sidco"}))]
)
def test_no_tensor_is_missing_ahead_of_fusion_and_some_are_behind(make: Make, compressor: str) -> None:
    missing = {}
    for scope in ("tensor", "group"):
        cluster = make(2, compressor=compressor, scope=scope, fusion="single", collective="allgather", density=0.01)
        missing[scope] = 0
        for step in range(STEPS):
            random_window(cluster, step)
            missing[scope] += cluster.engines[1].record.as_dict()["tensors_missing"]
    assert missing["tensor"] == 0
    if compressor not in ("randomk", "adtopk"):  # uniform over a buffer, or over its rows: not by magnitude
        assert missing["group"] > 0


def test_naive_workers_fill_buffers_at_their_own_pace_and_agree(make: Make) -> None:
    # an estimator whose counts differ between workers, and buffers so small that the workers need different numbers of
    # them
    cluster = make(3, compressor="gaussiank", fusion=Naive(buffer_elements=100), collective="allgather", density=0.02)
    train(cluster, 2)
    uneven = [
        [(g * (1.0 if rank else 0.0) + (torch.arange(len(g)) == 0) * 1.0) for g in grads]
        for rank, grads in enumerate(cluster.random_grads(7))
    ]
    first, *others = cluster.step(uneven)
    assert all(equal(first, other) for other in others)


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
def test_ef21_gives_all_workers_the_mean_of_what_they_have_sent(make: Make, options: Any) -> None:
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


def test_ef21_at_density_1_is_the_mean_of_moving_averages(make: Make) -> None:
    cluster = make(2, density=1.0, memory="ef21")
    average = 0.0
    for step in range(4):
        mean = sum(map(flat, cluster.random_grads(step))) / 2
        average += (mean - average) * (0.2 if step else 1.0)
        torch.testing.assert_close(flat(random_window(cluster, step)[0]), average, rtol=1e-5, atol=1e-5)


def test_ef21_does_not_learn_from_a_window_that_ended_badly(make: Make) -> None:
    cluster = make(2, memory="ef21", collective="allgather")
    random_window(cluster, 0)
    before = [each.memory.state_dict()["estimate"].clone() for each in cluster.settings]
    spoiled = cluster.random_grads(1)
    spoiled[1][0][3] = torch.inf
    assert cluster.step(spoiled)[0][0].isnan().any()
    assert equal(before, [each.memory.state_dict()["estimate"] for each in cluster.settings])
    assert finite(random_window(cluster, 2))


@pytest.mark.parametrize(
    ("memory", "density", "achieved", "collectives"),
    [("ef21", 0.05, 0.05, {"allgather"}), ("residual", 0.05, 1.0, set()), ("ef21", 1.0, 1.0, {"allreduce"})],
)
def test_the_first_window_of_ef21_is_sparse(
    make: Make, memory: str, density: float, achieved: float, collectives: set[str]
) -> None:
    """A dense first gradient would stay in EF21's estimate for long; a residual keeps nothing of it."""
    cluster = make(2, memory=memory, collective="auto", density=density)
    random_window(cluster, 0)
    record = cluster.engines[0].record
    assert record.as_dict()["achieved_density"] == pytest.approx(achieved, rel=0.2)
    assert {buffer.collective for buffer in record.events.buffers} == collectives


def test_the_first_window_is_averaged_in_place(make: Make) -> None:
    cluster = make(2, collective="auto", density=0.05)
    grads = cluster.random_grads(0)
    fresh = [[(rank, i) not in ((0, 1), (0, 2), (1, 2)) for i in range(len(cluster.specs))] for rank in range(2)]
    means = cluster.step(grads, fresh)
    for rank, found in enumerate(means):
        expected = [(mine + theirs) / 2 for mine, theirs in zip(*grads, strict=True)]
        expected[1:3] = [grads[1][1] / 2, grads[rank][2]]  # one rank has the former, none the latter
        torch.testing.assert_close(found, expected)
    assert not flat(cluster.residuals()).any()
    engine = cluster.engines[0]
    assert len(engine.space.buffers) == 0
    report = engine.record.as_dict()
    sent = sum(s.numel * s.dtype.itemsize for s in cluster.specs if s.index not in (1, 2))
    assert (report["bytes_sent"], report["tensors_missing"]) == (sent, 0)


def test_decoupled_momentum_is_never_dense(make: Make) -> None:
    collectives = {}
    for memory in ("decoupled", "residual"):
        cluster = make(2, memory=memory, collective="auto", density=1.0)
        train(cluster, 4)
        collectives[memory] = {group.collective for group in cluster.engines[0].planner.current.groups}
    assert collectives == {"decoupled": {"allgather"}, "residual": {"allreduce"}}


def test_the_tree_loses_mass_from_three_workers_on(make: Make) -> None:
    assert_conserved(make(2, collective="gtopk", fusion="single", scope="group"))
    with pytest.raises(AssertionError):
        assert_conserved(make(3, collective="gtopk", fusion="single", scope="group"))


COLLECTIVES = [{"collective": name} for name in ("oktopk", "gtopk", "hierarchical")]


@pytest.mark.parametrize(
    ("part", "others", "because"),
    [
        ({"wire": "q2"}, [*COLLECTIVES[:2], {"fusion": "naive"}], "wire='q2' rounds so much"),
        ({"fusion": "selective"}, [{"scope": "group"}], "needs scope='tensor'"),
        ({"fusion": "naive"}, [{"collective": "hybrid"}], "fills buffers .* no lanes or levels"),
        ({"memory": "ef21"}, COLLECTIVES[1:2], "memory='ef21' sums all that is sent"),
        (
            {"offload": True},
            [{"scope": "group"}, {"quota": "pooled"}, {"fusion": "naive"}],
            "offload=True selects from each tensor alone",
        ),
        (
            {"fusion": "horovod"},
            [{"scope": "group"}, {"offload": True}, *COLLECTIVES],
            "fusion='horovod' has other buffers in every step",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(part: Any, others: list[dict[str, Any]], because: str) -> None:
    for other in others:
        with pytest.raises(ValueError, match=because):
            settings(**part, **other)


def test_a_shape_follows_order_and_density(make: Make) -> None:
    cluster = make(2, specs([(40,), (8, 10), (3,)]), density=0.25, fusion="single")
    train(cluster, 3)
    space = cluster.engines[0].space
    shape = space.shape
    assert shape is space.shape  # made once, not once per window
    assert shape.numels == tuple(spec.numel for spec in space.layout.specs)
    assert shape.quotas == tuple(space.quotas.counts.tolist())
    assert (shape.world_size, shape.device, shape.hybrid, len(shape)) == (2, "cpu", False, 3)
    entries = sum(shape.quotas)
    assert shape.entry_bytes == resolve_codec("auto", 123, entries, torch.float32).nbytes / entries
    space.set_density(1.0)
    assert space.shape.all_dense
    assert not shape.all_dense
    with pytest.raises(FrozenInstanceError):
        shape.entry_bytes = 1.0


def test_buffers_of_a_replaced_plan_are_forgotten(make: Make) -> None:
    cluster = make(2, specs([(40,), (8, 10), (30,)]), density=0.25, fusion="wfbp", collective="allgather")
    train(cluster, 4)
    spaces = [engine.space for engine in cluster.engines]
    assert all(len(space.buffers) >= 3 for space in spaces)
    first = [next(iter(space.buffers.values())) for space in spaces]
    cluster.each(lambda rank: cluster.engines[rank].planner.use(Plan.from_stops([1, 3]), spaces[rank].shape))
    random_window(cluster, 0)
    for space, buffer in zip(spaces, first, strict=True):
        assert [group.stop for group in space.buffers] == [1, 3]
        assert space.buffers[buffer.group] is buffer  # it is in both plans


@pytest.mark.slow
@pytest.mark.flaky(reruns=1, reason="compares times of a machine that others may use")
@pytest.mark.parametrize("bad", [False, True])
def test_four_times_the_tensors_take_no_more_than_about_four_times_as_long(make: Make, bad: bool) -> None:
    def once(tensors: int) -> float:
        """Processor time of set-up and of the first windows; half of the gradients may be bad."""
        began = time.process_time()
        cluster = make(1, specs([(4,)] * tensors), collective="auto", fusion="single")
        for step in range(3):
            grads = cluster.random_grads(step)
            for grad in grads[0][::2] if bad else ():
                grad[0] = torch.inf
            cluster.step(grads)
        return time.process_time() - began

    once(1000)  # what is loaded with the first window
    assert min(once(4000) for _ in range(3)) < 8 * min(once(1000) for _ in range(3))
