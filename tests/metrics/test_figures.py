"""What the figures say of one window, against what went in and what was left in the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from lightning_safusion.metrics import TensorFigures
from lightning_safusion.metrics.figures import window_figures
from lightning_safusion.sparsify.base import element_quota
from tests.cluster import SHAPES, Cluster, settings


@pytest.fixture
def make() -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as made:

        def build(steps: int = 0, **options: Any) -> Cluster:
            """After so many steps with random gradients."""
            options = {"collective": "allgather", "fusion": "aligned"} | options
            cluster = made.enter_context(closing(Cluster(2, lambda: settings(**options))))
            for step in range(steps):
                cluster.step(cluster.random_grads(step))
            return cluster

        yield build


def figures(cluster: Cluster, rank: int = 0) -> TensorFigures:
    record = cluster.engines[rank].record
    return window_figures(record)


def state(cluster: Cluster, name: str) -> list[torch.Tensor]:
    """What rank 0's memory holds, by registration index; zeros if nothing of that name."""
    engine = cluster.engines[0]
    layout = engine.space.layout
    held = engine.space.memory.state_dict().get(name, torch.zeros(layout.numel)).double()
    places = [layout.places[index] for index in range(len(layout))]
    return [held[layout.edges[place] : layout.edges[place + 1]].clone() for place in places]


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors])


def test_nothing_is_missing_before_fusion_and_small_tensors_are_after_it(make: Callable[..., Cluster]) -> None:
    before_fusion, after_fusion = make(4), make(4, scope="group")
    got = figures(before_fusion)
    assert got.names == tuple(f"t{index}" for index in range(len(SHAPES)))
    empty = SHAPES.index((0,))
    assert got.windows.tolist() == [float(index != empty) for index in range(len(SHAPES))]
    assert got.missing.sum() == 0
    assert got.sent.tolist() == [element_quota(s.numel, 0.05) if s.numel else 0 for s in before_fusion.specs]
    assert got.elements.tolist() == [s.numel for s in before_fusion.specs]
    # t6 is so much larger that it takes the room of t7, t8 and t9; t5 is empty; t3 is a thousand times as large as t4
    grads = after_fusion.random_grads(4)
    grads[0][6] *= 1e6
    after_fusion.step(grads)
    got = figures(after_fusion)
    assert [index for index in range(2, 10) if got.missing[index]] == [4, 7, 8, 9]
    assert figures(after_fusion, rank=1).missing[6:].tolist() != got.missing[6:].tolist()


@pytest.mark.parametrize("scope", ["tensor", "group"])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("memory", ["residual", "dgc", "none"])
def test_energy_and_error_are_those_of_what_was_selected_from(
    make: Callable[..., Cluster], memory: str, wire: str, scope: str
) -> None:
    cluster = make(3, memory=memory, wire=wire, scope=scope)
    grads = cluster.random_grads(9)[0]
    if memory == "none":
        x = [grad.double() for grad in grads]
    elif memory == "residual":
        x = [held + grad for held, grad in zip(state(cluster, "residual"), grads, strict=True)]
    else:
        momentum = state(cluster, "momentum")
        x = [v + 0.9 * u + g for v, u, g in zip(state(cluster, "velocity"), momentum, grads, strict=True)]
    cluster.step(cluster.random_grads(9))
    got = figures(cluster)
    sparse = got.energy > 0
    assert sparse.sum() >= 7
    torch.testing.assert_close(got.energy[sparse], norms(x)[sparse], rtol=1e-5, atol=0.0)
    if memory == "none":
        left = norms(x) - norms([each.abs().topk(int(n)).values for each, n in zip(x, got.sent, strict=True)])
    else:
        left = norms(state(cluster, "residual" if memory == "residual" else "velocity"))
    torch.testing.assert_close(got.error[sparse], left[sparse], rtol=1e-2 if wire == "bf16" else 1e-5, atol=1e-9)
    assert (got.error <= got.energy).all()
    if scope == "tensor":
        assert (got.error[sparse] < 0.95 * got.energy[sparse]).all()  # top-k sends at least its share


@pytest.mark.parametrize("options", [{"collective": "allreduce"}, {"density": 1.0}])
def test_dense_tensors_have_no_error(make: Callable[..., Cluster], options: dict[str, Any]) -> None:
    cluster = make(3, **options)
    got = figures(cluster)
    assert got.energy.sum() == got.error.sum() == got.missing.sum() == 0
    assert torch.equal(got.sent, got.elements)


def test_errors_are_left_out_on_request(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    short = window_figures(cluster.engines[0].record, errors=False)
    assert torch.equal(short.sums[:4], figures(cluster).sums[:4])
    assert short.sums[4:].abs().sum() == 0
    assert figures(cluster).energy[0] > 0


def test_stale_tensors_count_on_no_rank_and_irregular_ones_neither(make: Callable[..., Cluster]) -> None:
    cluster = make(2, scope="group")
    count = len(SHAPES)
    # t3 has a gradient on no rank, t6 on rank 1 only
    fresh = [[index not in (3, 6) for index in range(count)], [index != 3 for index in range(count)]]
    with pytest.warns(UserWarning, match="computed on some ranks only"):
        cluster.step(cluster.random_grads(2), fresh=fresh)
    for rank in range(2):
        got = figures(cluster, rank)
        assert [got.windows[index].item() for index in (3, 6, 7)] == [0, 0, 1]
        assert got.sums[:, [3, 6]].abs().sum() == 0


def test_a_window_that_is_not_finite_counts_on_no_rank(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    grads = cluster.random_grads(2)
    grads[1][4][0] = torch.nan
    cluster.step(grads)
    assert all(figures(cluster, rank).sums.abs().sum() == 0 for rank in range(2))
    cluster.step(cluster.random_grads(3))
    assert figures(cluster).windows.sum() == len(SHAPES) - 1


def test_names_stay_in_registration_order_whatever_the_ready_order(make: Callable[..., Cluster]) -> None:
    cluster = make(scope="group")
    order = [4, 9, 0, 2, 1, 3, 8, 7, 6, 5]
    for step in range(4):
        cluster.step(cluster.random_grads(step), order=order)
    got = figures(cluster)
    assert cluster.engines[0].space.layout.names(range(3)) == ["t4", "t9", "t0"]
    assert got.names == tuple(f"t{index}" for index in range(len(SHAPES)))
    assert got.elements.tolist() == [s.numel for s in cluster.specs]


def test_a_window_in_another_order_is_measured_against_the_memory_that_was_moved(make: Callable[..., Cluster]) -> None:
    cluster = make(3)
    held, grads = state(cluster, "residual"), cluster.random_grads(3)
    cluster.step(grads, order=[4, 9, 0, 2, 1, 3, 8, 7, 6, 5])
    got = figures(cluster)
    sparse = got.energy > 0
    assert sparse.sum() >= 7
    x = norms([before + grad for before, grad in zip(held, grads[0], strict=True)])
    torch.testing.assert_close(got.energy[sparse], x[sparse], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got.error[sparse], norms(state(cluster, "residual"))[sparse], rtol=1e-5, atol=1e-9)


def test_sums_over_ranks_and_windows(make: Callable[..., Cluster]) -> None:
    cluster = make(4, scope="group")
    both = [figures(cluster, rank) for rank in range(2)]
    total = both[0].reduced(lambda sums: sums.add_(both[1].sums))  # in place, as all-reduce
    assert torch.equal(total.sums, (both[0] + both[1]).sums)
    everywhere = total.everywhere()
    nowhere_sent = (both[0].missing + both[1].missing) == 2
    assert torch.equal(everywhere.missing, nowhere_sent.double())
    assert everywhere.windows.sum() == len(SHAPES) - 1
    other = TensorFigures(("another",), torch.zeros(6, 1))
    with pytest.raises(ValueError, match="10 and 1 different tensors"):
        both[0] + other
