"""The engine below DDP in a loop of plain PyTorch."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import SAFusionStrategy, attach
from tests.models import TinyClassifier, classification, equal, trainer, weights
from tests.packaging.environments import run
from tests.process_group import run_launched, run_ranks

SPARSE: dict[str, Any] = {"density": 0.05, "collective": "allgather"}
OWN_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def batches(rank: int, workers: int = 2) -> list[tuple[Tensor, Tensor]]:
    """What DistributedSampler gives a worker of Trainer's in the first epoch."""
    data = classification().dataset
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data), generator=generator)[rank::workers]  # type: ignore[arg-type]  # it has a length
    x, y = data.tensors  # type: ignore[attr-defined]  # a TensorDataset
    return [(x[part], y[part]) for part in order.split(16)]


class Steps:
    """What trains a model on one worker step by step."""

    model: Any

    def step(self, *parts: tuple[Tensor, Tensor]) -> None:
        """Steps with the sum of the gradients of some batches."""
        raise NotImplementedError

    def train(self, parts: list[tuple[Tensor, Tensor]], together: int = 1) -> None:
        for start in range(0, len(parts), together):
            self.step(*parts[start : start + together])

    @property
    def weights(self) -> list[Tensor]:
        return weights(self.model)


class Loop(Steps):
    """A training of plain PyTorch."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer] = adamw,
        scaled: bool = False,
        found: bool = False,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        torch.use_deterministic_algorithms(True)  # plans do not follow measured times
        self.model = DistributedDataParallel(TinyClassifier(), **(OWN_BUCKETS | options.pop("ddp", {})))
        self.optimizer = make(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
        if compiled:
            self.model = torch.compile(self.model, backend="eager")
        given = None if found else self.optimizer
        self.handle = attach(self.model, given, scaler=self.scaler, **(SPARSE | options))

    def step(self, *parts: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        for number, (x, y) in enumerate(parts):
            with self.model.no_sync() if number < len(parts) - 1 else nullcontext():
                loss = nn.functional.cross_entropy(self.model(x), y) / len(parts)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def by_loop(together: int = 1) -> list[Tensor]:
    """What a loop of plain PyTorch ends with."""

    def run(rank: int) -> list[Tensor]:
        loop = Loop()
        loop.train(batches(rank), together)
        return loop.weights

    return run_ranks(2, run)[0]


def by_trainer(options: dict[str, Any]) -> list[list[Tensor]]:
    def run(rank: int) -> list[Tensor]:
        model = TinyClassifier(make=adamw)
        trainer(SAFusionStrategy(**SPARSE), deterministic=True, **options).fit(model, classification())
        return weights(model)

    return run_launched(2, run)


@pytest.mark.parametrize(("together", "scaled"), [(1, False), (2, False), (1, True)])
def test_a_loop_ends_with_the_parameters_of_trainer(together: int, scaled: bool) -> None:
    def run(rank: int) -> tuple[list[Tensor], dict[str, Any]]:
        loop = Loop(scaled=scaled)
        loop.train(batches(rank), together)
        return loop.weights, loop.handle.figures()

    (first, figures), (second, _) = run_ranks(2, run)
    assert equal(first, second)
    assert figures["plain_ddp"] is None
    assert figures["windows"] == 20 // together
    assert equal(first, by_trainer({"accumulate_grad_batches": together})[0])


@pytest.mark.parametrize("ddp", [{"bucket_cap_mb": 25}, {"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_other_buckets_end_with_the_same(ddp: dict[str, Any]) -> None:
    def run(rank: int) -> bool:
        ends = []
        for options in ({}, ddp):
            loop = Loop(ddp=options, fusion="single")
            loop.train(batches(rank)[:6])
            ends.append(loop.weights)
        return equal(*ends)

    assert run_ranks(2, run) == [True, True]


def test_density_one_is_ddp() -> None:
    def run(rank: int) -> tuple[bool, Any]:
        loop, plain = Loop(density=1.0, collective="auto"), DistributedDataParallel(TinyClassifier())
        optimizer = adamw(plain.parameters())
        for x, y in batches(rank):
            loop.step((x, y))
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
        return equal(loop.weights, weights(plain)), loop.handle.state_dict()

    assert run_ranks(2, run) == [(True, {})] * 2


def state_of(loop: Loop) -> dict[str, Any]:
    """What rank 0 would write, on all workers."""
    state = {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "safusion": loop.handle.state_dict(),
    }
    shared = [copy.deepcopy(state)]
    dist.broadcast_object_list(shared)
    return shared[0]


def restored(state: dict[str, Any]) -> Loop:
    loop = Loop()
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    loop.handle.load_state_dict(state["safusion"])
    return loop


def test_a_state_resumes_bit_for_bit() -> None:
    def run(rank: int) -> bool:
        loop, mine = Loop(), batches(rank)
        loop.train(mine[:8])
        again = restored(state_of(loop))
        for batch in mine[8:]:
            loop.step(batch)
            again.step(batch)
        return equal(loop.weights, again.weights)

    assert run_ranks(2, run) == [True, True]


def test_other_numbers_of_workers_take_the_mean_of_the_residuals() -> None:
    def save(rank: int) -> tuple[dict[str, Any], Tensor]:
        loop = Loop()
        loop.train(batches(rank)[:8])
        assert loop.handle.engine is not None
        return state_of(loop), loop.handle.engine.space.memory.state_dict()["residual"].clone()

    (state, one), (_, other) = run_ranks(2, save)

    def load(rank: int) -> tuple[Tensor, list[Tensor]]:
        loop = restored(state)
        assert loop.handle.engine is not None
        residual = loop.handle.engine.space.memory.state_dict()["residual"].clone()
        loop.step(batches(rank, 3)[0])
        return residual, loop.weights

    for residual, ended in (results := run_ranks(3, load)):
        torch.testing.assert_close(residual.sort().values, ((one + other) / 2).sort().values)
        assert equal(ended, results[0][1])


def test_ddp_goes_on_after_the_end() -> None:
    def run(rank: int) -> tuple[list[Tensor], list[Tensor], Any]:
        loop, mine = Loop(), batches(rank)
        loop.train(mine[:5])
        loop.handle.close()
        alone = copy.deepcopy(loop.model.module)
        loop.step(mine[5])
        loop.step(mine[6])  # DDP's buckets as they are from the second step on
        loop.optimizer.zero_grad()
        alone.load_state_dict(loop.model.module.state_dict())
        for model in (loop.model, alone):
            nn.functional.cross_entropy(model(mine[7][0]), mine[7][1]).backward()
        means = [param.grad for param in alone.parameters()]
        for mean in means:
            dist.all_reduce(mean)
        grads = [param.grad for param in loop.model.parameters()]
        return grads, [mean / 2 for mean in means], loop.handle.figures()["plain_ddp"]

    for grads, means, plain in run_ranks(2, run):
        torch.testing.assert_close(grads, means)
        assert plain == "it was closed"


def test_optimizers_are_found_when_they_step() -> None:
    """The first step is one of DDP, as it is with this default."""

    def run(rank: int) -> tuple[list[list[Tensor]], list[Any]]:
        loops = [Loop(found=found, collective="auto", fusion="single") for found in (False, True)]
        for loop in loops:
            loop.train(batches(rank), together=2)
        return [loop.weights for loop in loops], [loop.handle.figures()["windows"] for loop in loops]

    (both, windows), (others, _) = run_ranks(2, run)
    assert windows == [10, 9]
    assert all(map(equal, both, others))


def test_another_optimizer_goes_on_with_the_residuals() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, int, list[Tensor]]:
        loop, mine = Loop(), batches(rank)
        loop.train(mine[:5])
        before, after = loop.handle.engine, None
        assert before is not None
        held = before.space.memory.state_dict()["residual"].clone()
        loop.optimizer = adamw(loop.model.parameters())
        loop.handle.bind([loop.optimizer])
        after = loop.handle.engine
        assert after is not None
        kept = after.space.memory.state_dict()["residual"].clone()
        loop.step(mine[5])
        return held.sort().values, kept.sort().values, loop.handle.figures()["windows"], loop.weights

    for held, kept, windows, _ in (ends := run_ranks(2, run)):
        assert torch.equal(held, kept)
        assert held.any()
        assert windows == 6
    assert equal(ends[0][3], ends[1][3])


@pytest.mark.parametrize("found", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_may_be_compiled(found: bool) -> None:
    def run(rank: int) -> bool:
        loops = Loop(found=found), Loop(found=found, compiled=True)
        for loop in loops:
            loop.train(batches(rank)[:6])
        return equal(loops[0].weights, loops[1].weights)

    assert run_ranks(2, run) == [True, True]


BLOCKED = """
import runpy, sys

class Blocks:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "torchmetrics"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocks())
runpy.run_path(sys.argv[1], run_name="__main__")
import lightning_safusion
try:
    lightning_safusion.SAFusionStrategy
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_lightning_need_not_be_importable(tmp_path: Path) -> None:
    """The example trains, and goes on from its checkpoint."""
    (tmp_path / "blocked.py").write_text(BLOCKED)
    example = (Path(__file__).parents[2] / "examples" / "plain_torch.py").read_text()
    printed = []
    for epochs in (2, 5):
        (tmp_path / "loop.py").write_text(example.replace("EPOCHS, CHECKPOINT = 5", f"EPOCHS, CHECKPOINT = {epochs}"))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        printed.append(run(*torchrun, "blocked.py", "loop.py", cwd=tmp_path))
    assert "epoch 1: " in printed[0]
    assert "epoch 1: " not in printed[1]
    assert re.search(r"epoch 4: accuracy (0\.9|1\.0)", printed[1]), printed[1]
    assert "SAFusionStrategy needs Lightning, which cannot be imported: lightning is blocked" in printed[1]


class Branches(nn.Module):
    """A worker, in a step, uses one of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(32, 10), nn.Linear(32, 10)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        out: Tensor = (self.other if other else self.one)(x)
        return out


def test_missing_gradients_end_the_step() -> None:
    def run(rank: int) -> str:
        model = DistributedDataParallel(Branches(), **OWN_BUCKETS)
        optimizer = adamw(model.parameters())
        attach(model, optimizer, **SPARSE)
        model(torch.ones(2, 32), False).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        return str(raised.value)

    for said in run_ranks(2, run):
        assert "2 parameters got no gradient in this backward pass: other.weight, other.bias" in said


def test_parameters_that_are_frozen_later() -> None:
    """DDP still passes them on, among those that are unused."""

    def run(rank: int) -> tuple[list[Tensor], str]:
        model = DistributedDataParallel(Branches(), find_unused_parameters=True, **OWN_BUCKETS)
        optimizer = adamw(model.parameters())
        handle = attach(model, optimizer, **SPARSE)

        def step(number: int) -> None:
            optimizer.zero_grad()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * number + rank))
            model(x, number < 2 and rank == 1).square().mean().backward()
            optimizer.step()

        for number in range(5):
            if number == 2:
                model.module.other.requires_grad_(False)
                handle.bind([optimizer])
            step(number)
        ended = weights(model)
        model.module.other.requires_grad_(True)
        with pytest.raises(RuntimeError) as raised:
            step(5)
        return ended, str(raised.value)

    (first, said), (second, _) = run_ranks(2, run)
    assert equal(first, second)
    assert "was frozen at set-up, and is not now: call bind" in said


def test_what_waits_for_a_frozen_parameter_is_explained() -> None:
    """DDP has it in a bucket with others, and does not look for those without a gradient."""

    def run(rank: int) -> str:
        net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 4))
        model = DistributedDataParallel(net, **OWN_BUCKETS)
        optimizer = adamw(model.parameters())
        handle = attach(model, optimizer, **SPARSE)
        for number in range(3):
            if number == 2:  # DDP has made its buckets
                net[0].requires_grad_(False)
                handle.bind(optimizer)
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
            with pytest.raises(RuntimeError) if number == 2 else nullcontext() as raised:
                optimizer.step()
        return str(raised.value)

    for said in run_ranks(2, run):
        assert "no gradient in this backward pass: 1.bias." in said
        assert "another parameter of their bucket has no gradient: one that was frozen after DDP had wrapped" in said


def test_a_copy_of_the_model_has_nothing_attached() -> None:
    def run(rank: int) -> list[tuple[int, list[Tensor]]]:
        loop, ends = Loop(), []
        loop.step(batches(rank)[0])
        for duplicate in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):  # noqa: S301 (our own)
            duplicate.zero_grad()
            duplicate(batches(rank)[1][0]).square().mean().backward()
            ends.append((loop.handle.figures()["windows"], [param.grad for param in duplicate.parameters()]))
        return ends

    for (windows, ours), (_, theirs) in zip(*run_ranks(2, run), strict=True):
        assert windows == 1
        assert equal(ours, theirs)


def test_what_is_dropped_is_freed() -> None:
    """DDP's reducer holds the engine, and Python does not see that."""

    def run(rank: int) -> list[bool]:
        freed = []
        for found in (False, True):
            loop = Loop(found=found)
            loop.step(batches(rank)[0])
            loop.step(batches(rank)[1])
            gone = weakref.ref(loop.model), weakref.ref(loop.handle.engine)
            del loop
            gc.collect()
            gc.collect()  # what the reducer held
            freed += [reference() is None for reference in gone]
        return freed

    assert run_ranks(2, run) == [[True] * 4] * 2


def test_an_optimizer_that_was_not_given_is_named() -> None:
    def run(rank: int) -> int:
        loop = Loop()
        loop.step(batches(rank)[0])
        loop.optimizer = torch.optim.Adagrad(loop.model.parameters())
        with pytest.warns(match="Adagrad steps parameters of the model, and was not given to attach: call bind"):
            loop.step(batches(rank)[1])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*was not given to attach")
            loop.step(batches(rank)[2])  # once
            loop.optimizer = adamw(loop.model.parameters())
            loop.handle.bind([loop.optimizer])
            loop.step(batches(rank)[3])
        windows: int = loop.handle.figures()["windows"]
        return windows

    assert run_ranks(2, run) == [4, 4]


def test_optimizers_of_another_model_are_named() -> None:
    def run(rank: int) -> None:
        model = DistributedDataParallel(TinyClassifier(), **OWN_BUCKETS)
        with pytest.warns(match="none of the optimizers has a parameter of the model"):
            attach(model, adamw(TinyClassifier().parameters()), **SPARSE)

    run_ranks(2, run)


def test_the_end_comes_once() -> None:
    def run(rank: int) -> int:
        loop = Loop()
        ended = loop.handle
        ended.close()
        loop.handle = attach(loop.model, loop.optimizer, **SPARSE)
        ended.close()
        with pytest.raises(RuntimeError, match="has given the model back: call attach again"):
            ended.bind([loop.optimizer])
        loop.train(batches(rank)[:2])
        windows: int = loop.handle.figures()["windows"]
        return windows

    assert run_ranks(2, run) == [2, 2]


def test_a_state_on_some_workers_alone_is_refused_on_all() -> None:
    def run(rank: int) -> list[Tensor]:
        loop = Loop()
        state = loop.handle.state_dict()
        with pytest.raises(ValueError, match="rank 1 has no state, rank 0 has one: give all workers that of rank 0"):
            loop.handle.load_state_dict({} if rank else state)
        with pytest.raises(TypeError, match=r"takes what state_dict has returned, got 'epoch_1.pt' of type str"):
            loop.handle.load_state_dict("epoch_1.pt")  # type: ignore[arg-type]  # it is refused
        loop.handle.bind(loop.optimizer)  # a single one
        loop.step(batches(rank)[0])
        return loop.weights

    assert equal(*run_ranks(2, run))


def test_the_epoch_is_heard_of_in_every_mode() -> None:
    def run(rank: int) -> int:
        loop = Loop()
        loop.model.eval()
        loop.handle.epoch = 3
        loop.step(batches(rank)[0])
        assert loop.handle.engine is not None
        return loop.handle.engine.epoch

    assert run_ranks(2, run) == [3, 3]


def test_join_is_refused() -> None:
    def run(rank: int) -> None:
        loop = Loop()
        with pytest.raises(RuntimeError, match="give all workers as many batches"), loop.model.join():
            loop.step(batches(rank)[0])

    run_ranks(2, run)


def test_what_is_refused() -> None:
    def run(rank: int) -> list[str]:
        model = DistributedDataParallel(TinyClassifier(), **OWN_BUCKETS)
        optimizer = adamw(model.parameters())
        wrong: list[tuple[Any, dict[str, Any]]] = [
            (TinyClassifier(), {}),
            (model, {"densty": 0.1}),
            (model, {"system": "powersgd"}),
            (model, {"density": 2.0}),
            (model, {"scaler": True}),
            (model, {"timeout": 30}),
            (model, {"timeout": timedelta(0)}),
            (model, {"optimizers": model.parameters()}),
            (model, {"density": 0.1 if rank else 0.2}),
        ]
        said = []
        for refused, options in wrong:
            with pytest.raises(Exception, match=".") as raised:
                attach(refused, **{"optimizers": optimizer, **options})
            said.append(f"{raised.type.__name__}: {raised.value}")
        first = attach(model, optimizer)  # nothing is left of those
        with pytest.raises(RuntimeError, match="attached already"):
            attach(model, optimizer)
        first.close()
        attach(model, optimizer).close()
        return said

    for said in run_ranks(2, run):
        for text, expected in zip(
            said,
            [
                "TypeError: attach needs a model in DistributedDataParallel, got TinyClassifier",
                "TypeError: attach has no argument 'densty'; the parts are compressor",
                "MisconfigurationException: system='powersgd' works without the engine",
                "ValueError: density",
                "TypeError: scaler must be a torch.amp.GradScaler, got True",
                "TypeError: timeout must be a datetime.timedelta, such as timedelta(minutes=5), got 30",
                "ValueError: timeout must be longer than nothing, got datetime.timedelta(0)",
                "TypeError: optimizers must be a torch.optim.Optimizer or a list of them, got Parameter",
                "RuntimeError: workers were started with different settings: density: rank 0 has",
            ],
            strict=True,
        ):
            assert text.startswith(expected)
