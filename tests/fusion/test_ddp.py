"""The adapter in real process groups, against plain DDP, through every trap of its communication hooks."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_safusion.comm.transport.torch_backend import default_transport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB, DDPHook
from lightning_safusion.fusion.layout import specs_from_parameters
from tests.cluster import settings
from tests.models import distance, equal
from tests.process_group import run_ranks
from tests.quick import slow


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
    untrained = [(n, p) for n, p in trainable if n == "probe"]
    trained = [(n, p) for n, p in trainable if n != "probe"]
    named, sparse = ([(n, p) for n, p in trained if (id(p) in tables) == wanted] for wanted in (False, True))
    engine = build_engine(
        settings(**options),
        specs_from_parameters(named),
        default_transport(),
        torch.device("cpu"),
        JobTraits(measure=False, overlap=not ddp_options.get("find_unused_parameters")),
    )
    hook = DDPHook(engine, [p for _, p in named], sparse, bool(ddp_options.get("static_graph")), untrained)
    ddp.register_comm_hook(None, hook.run)
    return ddp, hook


def optimized(ddp: Any, hook: DDPHook | None, lr: float, steps: int, loss: Callable[[int], Tensor]) -> list[Tensor]:
    """Parameters after some steps with a loss."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr)
    for step in range(steps):
        loss(step).backward()
        if hook is not None:
            hook.check_complete()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in ddp.parameters()]


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
        hook.watch([optimizer])
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
    "accumulation": {"accumulate": 3, "steps": 3},
    "static graph, two dtypes": {"static_graph": True, "mode": "double"},
    "used on one rank": {"mode": "unused", "find_unused_parameters": True, "spare_ranks": (1,)},
    "complex and frozen": {"mode": "complex frozen"},
    "reentrant checkpoint": {"mode": "checkpoint reentrant", "static_graph": True},
    "middle buckets, autocast around backward": {"bucket_cap_mb": 0.003, "autocast": True},
}
MORE: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "two dtypes": {"mode": "double"},
    "unused": {"mode": "unused", "find_unused_parameters": True},
    "checkpoint": {"mode": "checkpoint"},
    "large buckets": {"bucket_cap_mb": 25},
    "no bucket view": {"gradient_as_bucket_view": False},
    "compiled, accumulation": {"compiled": True, "accumulate": 3, "steps": 3},
    "compiled, unused": {"compiled": True, "mode": "unused", "find_unused_parameters": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cases", [CASES, *slow([MORE])], ids=["few", "more"])
def test_density_1_equals_ddp(request: pytest.FixtureRequest, cases: dict[str, dict[str, Any]]) -> None:
    if cases is MORE:  # some are compiled
        request.getfixturevalue("compiler")

    def each(rank: int) -> dict[str, float]:
        """Largest differences, from trainings in one process group."""
        found = {}
        for place, (name, case) in enumerate(cases.items()):
            collective = ("allgather", "allreduce")[place % 2]
            ours = train(rank, {"density": 1.0, "fusion": "aligned", "collective": collective}, **case)
            found[name] = distance(ours, train(rank, None, **case))
        return found

    for found in run_ranks(2, each, timeout=120):
        assert max(found.values()) <= 2e-6, found


FEW = [("adaptive", "static graph"), ("naive", "accumulation"), ("horovod", "used on one rank")]
OTHERS = ("accumulation", "static graph", "unused", "complex and frozen", "reentrant checkpoint")
ALL = [(fusion, case) for fusion in ("adaptive", "naive", "horovod") for case in OTHERS]
ALL += [("adaptive", "compiled, accumulation")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cases", [FEW, *slow([ALL])], ids=["few", "all"])
def test_sparse_training_keeps_replicas_equal(request: pytest.FixtureRequest, cases: list[tuple[str, str]]) -> None:
    if cases is ALL:
        request.getfixturevalue("compiler")

    def run(rank: int) -> list[list[Tensor]]:
        options, known = {"density": 0.1, "collective": "allgather"}, CASES | MORE
        return [train(rank, {"fusion": fusion} | options, **known[case]) for fusion, case in cases]

    for case, mine, theirs in zip(cases, *run_ranks(2, run, timeout=120), strict=True):
        assert equal(mine, theirs), case


def test_stale_gradients_do_not_touch_the_residual() -> None:
    def run(rank: int) -> tuple[bool, bool, bool]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 8)})
        model.forward = lambda key, x: model[key](x)
        ddp, hook = wrap(
            model, {"density": 0.1, "collective": "allgather", "fusion": "aligned"}, find_unused_parameters=True
        )
        space = hook.engine.space

        def held() -> list[Tensor]:
            """Of the part that the last backward pass does not use."""
            spans = [(space.layout.edges[p : p + 2], spec.name) for p, spec in enumerate(space.layout.specs)]
            return [space.memory.accumulated(*map(int, span)).clone() for span, name in spans if name.startswith("g.")]

        for step in range(4):
            for key in ("g", "d"):
                ddp(key, torch.randn(4, 8) + rank + step).square().mean().backward()
        before, grads = held(), {name: p.grad.clone() for name, p in model.named_parameters()}
        ddp("d", torch.randn(4, 8) + rank).square().mean().backward()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p.grad, grads[name])}
        return equal(held(), before), moved <= {"d.weight", "d.bias"}, bool(moved)

    assert run_ranks(2, run) == [(True, True, True)] * 2


def test_a_missing_parameter_is_named_before_the_step() -> None:
    def run(rank: int) -> list[str]:
        said = []
        for steps in (1, 2, 4):  # DDP's one first bucket, buckets of one, and a planned window
            ddp, hook = wrap(Net("unused"), {"density": 0.1})
            for step in range(steps):
                ddp(batch(rank, step), use_spare=step < steps - 1).sum().backward()
                try:
                    hook.check_complete()
                except RuntimeError as error:
                    said.append(f"{steps - step} left: {error}")
        return said

    for messages in run_ranks(2, run):
        assert len(messages) == 3
        for message in messages:
            assert message.startswith("1 left:")
            assert "spare.weight" in message
            assert "find_unused_parameters=True" in message


def test_nothing_is_leaked_after_close() -> None:
    def run(rank: int) -> bool:
        ddp, hook = wrap(Net(), {"density": 0.1})
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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rank_dependent_use_with_collectives_in_the_backward_pass() -> None:
    def run(rank: int, options: dict[str, Any] | None) -> list[Tensor]:
        ddp, _ = wrap(Synchronised(), options, find_unused_parameters=True)

        def loss(step: int) -> Tensor:
            data = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            return ddp(data, (rank + step) % 2 == 0).square().mean()

        return optimized(ddp, None, 0.1, 8, loss)

    def both(rank: int) -> float:
        return distance(run(rank, {"density": 1.0, "collective": "allgather", "fusion": "wfbp"}), run(rank, None))

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
        return len(hook._seen)

    assert run_ranks(1, buckets) == [3]


@pytest.mark.parametrize("ddp_options", [{}, *slow([{"static_graph": True}, {"find_unused_parameters": True}])])
def test_sparse_gradients_are_averaged_as_ddp_does(ddp_options: dict[str, Any]) -> None:
    def run(rank: int, ours: bool) -> list[Tensor]:
        ddp, hook = wrap(Tables(), {"density": 1.0, "collective": "allgather"} if ours else None, **ddp_options)
        return optimized(ddp, hook, 0.003, 4, lambda step: ddp(batch(rank, step)).square().sum())

    def both(rank: int) -> float:
        return distance(run(rank, True), run(rank, False))

    assert max(run_ranks(2, both)) < 1e-5


def test_a_gradient_that_no_optimizer_uses_may_come_after_those_of_the_tables() -> None:
    class Probed(Tables):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.Parameter(torch.ones(4))

        def forward(self, tokens: Tensor) -> Tensor:
            before = self.probe * 1  # the first operation forward is the last backward
            return super().forward(tokens) * before

    def run(rank: int) -> int:
        ddp, hook = wrap(Probed(), {"density": 1.0, "collective": "allgather"})
        for step in range(4):
            ddp(batch(rank, step)).square().sum().backward()
            hook.check_complete()
            assert not ddp.module.probe.grad.any()
        return hook.engine.windows

    assert run_ranks(2, run) == [4, 4]


def test_an_unused_sparse_table_is_named() -> None:
    def run(rank: int) -> str:
        model = Tables()
        ddp, hook = wrap(model, {"density": 0.5})
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

    with pytest.raises(RuntimeError, match=r"(?s)the exchange of the buffer with.*1\.weight"):
        run_ranks(2, _report_as_error, run, timeout=30)


def _report_as_error(rank: int, run: Callable[[int], str]) -> None:
    """Raises what the survivor saw: with a dead rank, only tracebacks come back."""
    raise RuntimeError(run(rank))
