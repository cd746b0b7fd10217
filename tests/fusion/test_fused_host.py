"""Fused kernels where the host decides: a loss scaler, tensors without a gradient, several backwards of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.kernels.cuda import launch
from tests.cluster import Cluster, specs
from tests.fusion.test_fused import FULL, MIXED, SHAPES, SHARDS, compare_in, served, shipments
from tests.fusion.windows import Make, finite, flat, random_window
from tests.models import equal
from tests.quick import slow

BAD = 4
# Tensors without a gradient, by window and rank: on all ranks, on one, on each another.
STALE: Sequence[Sequence[Sequence[int]]] = ([[1, 4]] * 2, [[0], []], [[5], [1]], [[], []])


@pytest.fixture
def make(make_fused: Make) -> Make:
    return partial(make_fused, tensors=specs(SHAPES), collective="allgather", wire="eliasfano-q4")


def pair(make: Make, scale: float | None = None, **options: Any) -> list[Cluster]:
    """Clusters whose host decides, with kernels and without, after a first window."""
    clusters = [make(**options, kernels=kernels) for kernels in (True, False)]
    for cluster in clusters:
        for engine in cluster.engines:
            engine.steps.tracked[:] = True
            if scale is not None:
                engine.loss_scale = lambda: torch.tensor(scale)
        random_window(cluster, 0)
        stepped(cluster)
    return clusters


def stepped(cluster: Cluster, without: Sequence[int] = ()) -> None:
    """Optimizers step, but for those of some tensors."""
    for engine in cluster.engines:
        engine.steps.unstepped[[i for i in range(len(cluster.specs)) if i not in without]] = False


def same(clusters: list[Cluster], seed: int, stale: Sequence[Sequence[int]] = ((), ())) -> None:
    """A window has the same bits with kernels and without: messages, gradients, residuals, and what was sent."""
    fresh = [[i not in own for i in range(len(clusters[0].specs))] for own in stale]
    assert equal(*(cluster.step(cluster.random_grads(seed), fresh) for cluster in clusters))
    assert equal(*(cluster.residuals() for cluster in clusters))
    assert [served(cluster) for cluster in clusters] == [{True}, {False}]
    for rank in range(2):
        for ours, theirs in zip(*(shipments(cluster, rank) for cluster in clusters), strict=True):
            assert ours.sent_counts().tolist() == theirs.sent_counts().tolist()
            if isinstance(ours.buffer.exchange, SparseAllGather):
                assert torch.equal(ours.buffer.exchange.messages[1], theirs.buffer.exchange.messages[1])


@pytest.mark.parametrize(
    ("scale", "options"),
    [
        (3.7, {"tensors": MIXED}),
        *slow([(1024.0, {"tensors": MIXED, "quota": "pooled", "memory": "decoupled"}), (3.7, SHARDS)]),
    ],
)
def test_a_scaled_loss(make: Make, scale: float, options: Any) -> None:
    clusters = pair(make, scale, **options)
    for seed in (1, 2):
        same(clusters, seed)
        for cluster in clusters:
            stepped(cluster)


@pytest.mark.filterwarnings("ignore:.*computed on some ranks only")
@pytest.mark.parametrize(
    ("options", "by_update"),
    [
        ({"tensors": MIXED}, False),
        *slow(
            [
                ({"quota": "pooled"}, True),
                ({"compressor": "gaussiank", "tensors": specs(FULL, dense=(1,))}, False),
                ({"compressor": "randomk", "tensors": MIXED}, False),
                ({**SHARDS, "tensors": specs(FULL, dense=(1,))}, True),
            ]
        ),
    ],
)
def test_tensors_without_a_gradient(make: Make, options: Any, by_update: bool) -> None:
    clusters = pair(make, **options)
    if by_update:
        compare_in(clusters)
    for seed, stale in enumerate(STALE, 1):
        same(clusters, seed, stale)
        for cluster in clusters:
            stepped(cluster)


@pytest.mark.filterwarnings("ignore:.*computed on some ranks only")
def test_optimizers_that_take_turns(make: Make) -> None:
    """A gradient that comes again before its optimizer has stepped goes past the residual."""
    clusters = pair(make)
    for seed, waiting in enumerate(((0, 1), (4,), ())):
        same(clusters, seed + 1)
        for cluster in clusters:
            stepped(cluster, waiting)


@pytest.mark.filterwarnings("ignore:gradients of t4 were not finite")
@pytest.mark.parametrize(
    ("scale", "options"), [(None, {}), *slow([(8.0, {}), (None, SHARDS), (8.0, {"tensors": MIXED})])]
)
def test_windows_that_are_not_finite(make: Make, scale: float | None, options: Any) -> None:
    """What an optimizer has used leaves the residual, the rest stays, and a later window averages element by element.

    The kernels take out again what a tensor has added before its bad element was seen: rounded, not bit for bit.
    """
    clusters = pair(make, scale, **options)
    for seed in (5, 6, 7):
        numbers = []
        for cluster in clusters:
            grads = cluster.random_grads(seed)
            if seed < 7:
                grads[0][BAD][2] = torch.nan
            means = cluster.step(grads)
            if seed == 5 or (scale is not None and seed == 6):  # what is beside the bad element was never a mean
                for own in means:
                    assert not finite(own[BAD])
                    own[BAD].zero_()
            stepped(cluster, (1, 3))
            for engine in cluster.engines:
                engine.settle()
                engine.steps.unstepped[:] = False
            numbers.append(flat([means, cluster.residuals()]).nan_to_num())
        torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-4)


def test_a_damaged_message_ends_the_window_with_an_error(make: Make) -> None:
    cluster = pair(make)[0]
    random_window(cluster, 1)
    stepped(cluster)
    buffer = next(iter(cluster.engines[0].space.buffers.values()))
    kernels = buffer._constants["kernels"][1]
    ranks = 4 * kernels.tables.message.fields[0]
    pack = kernels.pack

    def damaged(notices: int) -> None:
        pack(notices)
        kernels.sent[ranks : ranks + 2] = 255

    kernels.pack = damaged
    with pytest.raises(RuntimeError, match="a message is damaged"):
        random_window(cluster, 2)


class Beside(TorchDispatchMode):
    """Counts bytes that PyTorch's operations read and write beside the kernels, and the programs of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.programs, self._inside = 0, Counter[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside and not func.is_view and not func.name().startswith(("aten::empty", "aten::detach")):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.nbytes += sum(tensor.nbytes for tensor in tensors)
        return result

    def launch(self, own: Callable[..., None], kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        self.programs[kernel.fn.__name__] += programs
        self._inside = True  # the interpreter copies memory
        own(kernel, programs, *arguments, **constants)
        self._inside = False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*computed on some ranks only")
def test_the_host_decides_at_the_cost_of_a_window_in_which_the_device_does(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, own = specs(((100, 50), (60,), (1,), (60, 50), (40,))), launch.launch
    numel = sum(spec.numel for spec in tensors)
    costs = {}
    for name in ("device", "manual", "scaled", "unused"):
        # one rank: launches need no lock
        cluster = make(1, tensors=tensors, density=0.02, deferred=name == "device", kernels=True)
        (engine,) = cluster.engines
        if name != "device":
            engine.steps.tracked[:] = True
        if name == "scaled":
            engine.loss_scale = lambda: torch.tensor(8.0)
        compare_in([cluster])
        for seed in range(3):
            grads, beside = cluster.random_grads(seed)[0], Beside()
            monkeypatch.setattr(launch, "launch", partial(beside.launch, own))
            with beside if seed == 2 else nullcontext():
                for index in cluster.order:
                    engine.push(index, grads[index], fresh=name != "unused" or index != 1)
                engine.drain()
            stepped(cluster)
        assert served(cluster) == {True}
        costs[name] = beside
    for cost in costs.values():
        assert cost.nbytes <= costs["device"].nbytes + 0.25 * numel  # kernels move some 30 bytes per element
    for name in ("manual", "scaled"):
        assert costs[name].programs == costs["device"].programs
    assert costs["unused"].programs.keys() == costs["device"].programs.keys()
    assert costs["unused"].programs.total() <= costs["device"].programs.total()
