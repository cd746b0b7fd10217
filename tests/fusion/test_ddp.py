"""The adapter in real process groups, against plain DistributedDataParallel, through every trap of its communication
hooks.

Covers: bitwise or 1e-6 equality at density 1 (conv, norm, embedding, tied weights; accumulation; static graph; mixed
    dtypes; unused parameters; reentrant and non-reentrant checkpoints; complex parameters; bucket caps); 200 steps of
    equal replicas for every sparsifier; stale gradients of a two-phase loop; missing parameters by name; leaks;
    autocast; a peer that dies.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_safusion.comm import default_transport
from lightning_safusion.fusion.build import build_engine
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB, DDPHook
from lightning_safusion.fusion.layout import specs_from_parameters
from lightning_safusion.sparsify import available_sparsifiers
from tests.cluster import settings
from tests.process_group import run_ranks


class Net(nn.Module):
    """Convolution, norm, embedding and a tied output, with an optional checkpointed block and an unused branch."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mode = mode
        self.embed = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight
        if "unused" in mode:
            self.spare = nn.Linear(16, 16)
        if "double" in mode:
            self.wide = nn.Linear(16, 16, dtype=torch.float64)
        if "complex" in mode:
            self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        if "frozen" in mode:
            self.conv.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, use_spare: bool = False) -> Tensor:
        x = self.norm(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        for _ in range(2 if "checkpoint" in self.mode else 1):
            reentrant = "reentrant" in self.mode
            x = x + (checkpoint(self.block, x, use_reentrant=reentrant) if "checkpoint" in self.mode else self.block(x))
        if use_spare:
            x = x + self.spare(x)
        if "double" in self.mode:
            x = x + self.wide(x.double()).float()
        if "complex" in self.mode:
            x = x + (self.phase * x).real
        return self.out(x) * self.scale


def wrap(model: nn.Module, options: dict[str, Any] | None, **ddp_options: Any) -> tuple[Any, DDPHook | None]:
    """Plain DDP if ``options`` is None, else DDP with the hook."""
    if options is None:
        return DistributedDataParallel(model, **ddp_options), None
    usual = {"bucket_cap_mb": OWN_BUCKETS_MB, "gradient_as_bucket_view": True}
    ddp = DistributedDataParallel(model, **(usual | ddp_options))
    tables = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False)}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named, sparse = ([(n, p) for n, p in trainable if (id(p) in tables) == wanted] for wanted in (False, True))
    controller = build_engine(
        settings(**options),
        specs_from_parameters(named),
        default_transport(),
        torch.device("cpu"),
        measure=False,
        overlap=not ddp_options.get("find_unused_parameters"),
    )
    hook = DDPHook(controller, [p for _, p in named], sparse, bool(ddp_options.get("static_graph")))
    ddp.register_comm_hook(None, hook.run)
    return ddp, hook


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    rank: int,
    options: dict[str, Any] | None,
    mode: str = "",
    steps: int = 6,
    accumulate: int = 1,
    spare_ranks: Sequence[int] = (),
    autocast: bool = False,
    compiled: bool = False,
    **ddp_options: Any,
) -> list[Tensor]:
    """Trains and returns all parameters; checks that the gradients are equal on all ranks after every backward."""
    ddp, hook = wrap(Net(mode), options, **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    if hook is not None:
        hook.watch(optimizer)
    model = ddp
    if compiled:
        torch._dynamo.reset()
        ddp.bucket_bytes_cap = 25 << 20  # by which Dynamo splits graphs
        model = torch.compile(ddp, backend="aot_eager")
    for step in range(steps):
        for micro in range(accumulate):
            ddp.require_backward_grad_sync = micro == accumulate - 1
            tokens = batch(rank, accumulate * step + micro)
            logits = model(tokens, use_spare=rank in spare_ranks)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):  # as Lightning's manual_backward
                loss.backward()
        if hook is not None:
            hook.check_complete(ddp.require_backward_grad_sync)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in ddp.parameters()]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "static graph": {"static_graph": True},
    "static graph, two dtypes": {"static_graph": True, "mode": "double"},
    "two dtypes": {"mode": "double"},
    "unused": {"mode": "unused", "find_unused_parameters": True},
    "used on one rank": {"mode": "unused", "find_unused_parameters": True, "spare_ranks": (1,)},
    "frozen": {"mode": "frozen"},
    "complex": {"mode": "complex"},
    "checkpoint": {"mode": "checkpoint"},
    "reentrant checkpoint": {"mode": "checkpoint reentrant", "static_graph": True},
    "autocast around backward": {"autocast": True},
    "large buckets": {"bucket_cap_mb": 25},
    "middle buckets": {"bucket_cap_mb": 0.003},
    "no bucket view": {"gradient_as_bucket_view": False},
    "compiled": {"compiled": True},
    "compiled, accumulation": {"compiled": True, "accumulate": 3},
    "compiled, unused": {"compiled": True, "mode": "unused", "find_unused_parameters": True},
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case.startswith("compiled") else case for case in CASES],
)
def test_density_1_equals_ddp(case: str) -> None:
    def both(rank: int) -> list[float]:
        plain = train(rank, None, **CASES[case])
        differences = []
        for options in ({"collective": "allgather"}, {"collective": "allreduce"}):
            ours = train(rank, {"density": 1.0, "fusion": "aligned"} | options, **CASES[case])
            differences.append(max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True)))
        return differences

    for differences in run_ranks(2, both):
        assert max(differences) <= 2e-6, differences


def test_density_1_equals_ddp_bitwise_on_two_workers() -> None:
    def both(rank: int) -> bool:
        plain = train(rank, None, steps=20)
        ours = train(rank, {"density": 1.0, "collective": "allgather"}, steps=20)
        return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))

    assert all(run_ranks(2, both))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("fusion", "case"),
    [
        pytest.param(fusion, case, marks=() if fusion == "adaptive" or case == "plain" else pytest.mark.slow)
        for fusion in ("adaptive", "naive", "horovod")
        for case in ("plain", "accumulation", "static graph", "unused", "complex", "reentrant checkpoint", "compiled")
    ],
)
def test_sparse_training_keeps_replicas_equal(case: str, fusion: str) -> None:
    def run(rank: int) -> list[Tensor]:
        return train(rank, {"density": 0.1, "fusion": fusion, "collective": "allgather"}, **CASES[case])

    for mine, theirs in zip(*run_ranks(2, run), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("world_size", "steps"), [(2, 70), pytest.param(3, 200, marks=pytest.mark.slow)])
def test_replicas_stay_bitwise_identical_with_every_sparsifier(world_size: int, steps: int) -> None:
    def run(rank: int) -> dict[str, list[bytes]]:
        found = {}
        for compressor in available_sparsifiers():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(20, 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 10))
            ddp, hook = wrap(model, {"compressor": compressor, "density": 0.05, "fusion": "aligned"})
            optimizer = torch.optim.Adam(ddp.parameters(), 0.01)
            sums = []
            for step in range(steps):  # Ok-Topk evaluates its thresholds every 32
                data = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
                ddp(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                sums.append(b"".join(p.detach().numpy().tobytes()[:64] for p in ddp.parameters()))
            found[compressor] = sums
            assert hook is not None
            hook.close()
        return found

    first, *others = run_ranks(world_size, run, timeout=120)
    for other in others:
        for compressor, sums in first.items():
            assert sums == other[compressor], compressor


def test_stale_gradients_do_not_touch_the_residual() -> None:
    def run(rank: int) -> tuple[bool, bool, bool]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 8)})
        model.forward = lambda key, x: model[key](x)
        ddp, hook = wrap(
            model, {"density": 0.1, "collective": "allgather", "fusion": "aligned"}, find_unused_parameters=True
        )
        assert hook is not None
        memory = hook.engine.space.memory
        for step in range(4):
            for key in ("g", "d"):
                ddp(key, torch.randn(4, 8) + rank + step).square().mean().backward()
        layout = hook.engine.space.layout
        held = {
            s.name: memory.accumulated(*map(int, layout.edges[p : p + 2])).clone() for p, s in enumerate(layout.specs)
        }
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        ddp("d", torch.randn(4, 8) + rank).square().mean().backward()
        same_residual = all(
            torch.equal(memory.accumulated(*map(int, layout.edges[p : p + 2])), held[s.name])
            for p, s in enumerate(layout.specs)
            if s.name.startswith("g.")
        )
        same_grad = all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if n.startswith("g."))
        moved = any(not torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if n.startswith("d."))
        return same_residual, same_grad, moved

    assert run_ranks(2, run) == [(True, True, True)] * 2


@pytest.mark.parametrize("steps", [1, 2, 4])  # DDP's one first bucket, buckets of one, and a planned window
def test_a_missing_parameter_is_named_before_the_step(steps: int) -> None:
    def run(rank: int) -> str:
        ddp, hook = wrap(Net("unused"), {"density": 0.1})
        assert hook is not None
        ddp(batch(rank, 0)).sum().backward()
        try:
            hook.check_complete()
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(2, run):
        assert "spare.weight" in message
        assert "find_unused_parameters=True" in message


def test_nothing_is_leaked_after_close() -> None:
    def run(rank: int) -> bool:
        ddp, hook = wrap(Net(), {"density": 0.1})
        assert hook is not None
        for step in range(3):
            ddp(batch(rank, step)).sum().backward()
        hook.close()
        alive = weakref.ref(ddp.module)
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in ddp.parameters()]
        del ddp, hook
        gc.collect()
        return alive() is None and not any(hooks)

    assert all(run_ranks(2, run))


class MeanOverRanks(torch.autograd.Function):
    """What SyncBatchNorm does to the order of collectives: one in the forward pass, one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.sum(0)
        dist.all_reduce(total)
        return x - total / (x.shape[0] * dist.get_world_size())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.sum(0)
        dist.all_reduce(total)
        return grad - total / (grad.shape[0] * dist.get_world_size())


class Synchronised(nn.Module):
    """Its side branch lies before everything else, is registered late, and only some ranks use it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.scale = nn.Linear(8, 16), nn.Parameter(torch.ones(16))
        self.side, self.out = nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x: Tensor, use_side: bool) -> Tensor:
        x = x + self.side(x) if use_side else x
        return self.out(MeanOverRanks.apply(self.body(x)) * self.scale)


def test_rank_dependent_use_with_collectives_in_the_backward_pass() -> None:
    def run(rank: int, options: dict[str, Any] | None) -> list[Tensor]:
        ddp, _ = wrap(Synchronised(), options, find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(8):
            data = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(data, (rank + step) % 2 == 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in ddp.parameters()]

    def both(rank: int) -> float:
        ours = run(rank, {"density": 1.0, "collective": "allgather", "fusion": "wfbp"})
        return max(float((a - b).abs().max()) for a, b in zip(ours, run(rank, None), strict=True))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert max(run_ranks(2, both, timeout=40)) <= 2e-6


class Tables(nn.Module):
    """Sparse embeddings below a dense layer; the tables are the last to get gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(50, 6, sparse=True)
        self.bag = nn.EmbeddingBag(30, 6, sparse=True, mode="sum")
        self.out = nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens).mean(1) + self.bag(tokens))


def test_every_parameter_has_a_bucket_of_its_own() -> None:
    """Empty ones too."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(size) for size in (1, 0, 9)])

        def forward(self) -> Tensor:
            return torch.cat(list(self.weights)).sum()

    def buckets(rank: int) -> int:
        ddp, hook = wrap(Sum(), {"collective": "allgather"})
        for _ in range(3):
            ddp().backward()
        assert hook is not None
        return len(hook._seen)

    assert run_ranks(1, buckets) == [3]


@pytest.mark.parametrize("ddp_options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_sparse_gradients_are_averaged_as_ddp_does(ddp_options: dict[str, Any]) -> None:
    def run(rank: int, ours: bool) -> list[Tensor]:
        ddp, hook = wrap(Tables(), {"density": 1.0, "collective": "allgather"} if ours else None, **ddp_options)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.003)
        for step in range(5):
            ddp(batch(rank, step)).square().sum().backward()
            if hook is not None:
                hook.check_complete()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in ddp.parameters()]

    def both(rank: int) -> float:
        pairs = zip(run(rank, True), run(rank, False), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)

    assert max(run_ranks(3, both)) < 1e-5


def test_an_unused_sparse_table_is_named() -> None:
    def run(rank: int) -> str:
        model = Tables()
        ddp, hook = wrap(model, {"density": 0.5})
        assert hook is not None
        for step in range(3):
            if step == 2:
                model.words = nn.Embedding(50, 6, sparse=True)  # not the table that DDP knows
            ddp(batch(rank, step)).sum().backward()
            try:
                hook.check_complete()
            except RuntimeError as error:
                return f"step {step}: {error}"
        return ""

    assert all(m.startswith("step 2: 1 parameters") and "words.weight" in m for m in run_ranks(2, run))


def test_survivors_of_a_dead_worker_name_the_buffer() -> None:
    def run(rank: int) -> str:
        # a model without buffers: DDP's own broadcast of them in the forward pass would fail first
        ddp, _ = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"density": 0.1, "collective": "allgather"})
        for step in range(5):
            if rank == 1 and step == 3:
                os._exit(0)
            try:
                ddp(torch.ones(2, 8)).sum().backward()
            except RuntimeError as error:
                return str(error)
        return "no error"

    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, _report_as_error, run, timeout=30)
    assert "the exchange of the buffer with" in str(caught.value)
    assert "1.weight" in str(caught.value)


def _report_as_error(rank: int, run: Callable[[int], str]) -> None:
    """Raises what the survivor saw: with a dead rank, only tracebacks come back."""
    raise RuntimeError(run(rank))
