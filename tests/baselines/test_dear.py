"""DeAR in real training: what the delayed steps give, what they wait for, and when they are not delayed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_safusion import SAFusionStrategy
from lightning_safusion.baselines.watch import ParameterWatch
from tests.integration.test_history import Lines
from tests.process_group import run_ranks
from tests.quick import quick_of
from tests.resume import At, InGroup, StepModel, parameters, run, saving

#: Buckets of one or two tensors of the models below.
BUCKET_MB = 1e-4


def dear(**options: Any) -> SAFusionStrategy:
    """DeAR with several buckets."""
    buckets = {"bucket_cap_mb": BUCKET_MB} | options
    return SAFusionStrategy(system="dear", cluster_environment=InGroup(), process_group_backend="gloo", **buckets)


def ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(cluster_environment=InGroup(), process_group_backend="gloo", **options)


class ReadsGradients(Callback):
    """Makes every step settle at once."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As the parameters may be asked for their gradients."""


class Model(StepModel):
    """Trains with any optimizer, and notes the weights that validation sees."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, 0.05, momentum=0.9))
        self.validated: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(sum(float(p.double().abs().sum()) for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Awkward(Model):
    """Parameters that are tied, frozen, unused on some ranks or on all, recurrent, sparse, and used by others."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__(optimizer)
        self.table = nn.Embedding(10, 8, sparse=True)
        self.words = nn.Embedding(12, 8)
        self.recurrent = nn.LSTM(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.words.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lent = nn.Linear(8, 8)
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.global_step + self.global_rank)
        tokens = torch.randint(10, (5, 3), generator=generator)
        x, _ = self.recurrent(self.words(tokens) + self.table(tokens) * self.gains[0])
        x = nn.functional.linear(self.frozen(x), self.lent.weight, self.lent.bias)
        if (self.global_step + self.global_rank) % 2:
            x = self.sometimes(x) * self.gains[1]
        penalty = sum(p.square().sum() for p in self.lent.parameters())
        loss = super().training_step(batch, batch_idx) + 0.01 * penalty
        return loss + nn.functional.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


class Manual(Model):
    """Two optimizers that take turns, with backward passes before and inside their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.backward_pass()
            optimizer.step()
            optimizer.step(closure=self.backward_pass)

    def backward_pass(self) -> None:
        self.manual_backward(StepModel.training_step(self, None, 0))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.hidden.parameters(), 0.1), torch.optim.Adam(self.conv.parameters(), 0.01)]


class OwnSGD(torch.optim.SGD):
    """An optimizer that torch has not written."""


def groups_and_schedule(params: Any) -> dict[str, Any]:
    first, *others = params
    groups = [{"params": [first], "lr": 0.03, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.1], total_steps=9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tensor_rate(params: Any) -> dict[str, Any]:
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.02), foreach=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def adam(params: Any) -> Optimizer:
    return torch.optim.Adam(params, 0.01)


def contiguous() -> Model:
    """LBFGS flattens gradients as they lie in memory."""
    model = Model(lambda params: torch.optim.LBFGS(params, 0.01, max_iter=2))
    model.conv = nn.Conv2d(3, 8, 3)
    return model


def stepped(job: Trainer) -> dict[str, Any]:
    """Weights and states of the optimizers."""
    states = [optimizer.state_dict()["state"] for optimizer in job.optimizers]
    states = [state[place] for state in states for place in sorted(state)]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    tensors = [value.to_dense() if value.is_sparse else value for value in tensors]
    return {"weights": parameters(job), "states": tensors, "groups": len(job.optimizers[0].param_groups)}


def three_ways(
    build: Callable[[], Model], strategy_options: dict[str, Any], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """DeAR, DeAR settled at once, DDP."""
    results = []
    for callbacks in ([], [ReadsGradients()], None):
        model = build()
        strategy = ddp(**strategy_options) if callbacks is None else dear(**strategy_options)
        job = run(strategy, 5, *(callbacks or []), model=model, **options)
        results.append(stepped(job) | {"validated": model.validated})
    return results


UNUSED = {"find_unused_parameters": True}
SCENARIOS: dict[str, tuple[Callable[[], Model], dict[str, Any], dict[str, Any]]] = {
    "sgd": (lambda: Model(sgd), {}, {}),
    "adam": (lambda: Model(adam), {}, {}),
    "groups and schedule": (lambda: Model(groups_and_schedule), {}, {}),
    "learning rate in a tensor": (lambda: Model(tensor_rate), {}, {}),
    "clipping": (lambda: Model(adam), {}, {"gradient_clip_val": 0.1}),
    "accumulation": (lambda: Model(adam), {}, {"accumulate_grad_batches": 2}),
    "validation": (lambda: Model(adam), {}, {"limit_val_batches": 1, "val_check_interval": 1}),
    "autocast": (lambda: Model(adam), {}, {"precision": "bf16-mixed"}),
    "double": (lambda: Model(adam), {}, {"precision": "64-true"}),
    "awkward": (lambda: Awkward(sgd), UNUSED, {}),
    "manual": (Manual, UNUSED, {}),
    "static graph": (lambda: Model(sgd), {"static_graph": True}, {}),
    "own optimizer": (lambda: Model(lambda params: OwnSGD(params, 0.1)), {}, {}),
    "lbfgs": (contiguous, {}, {}),
}


QUICK = ("groups and schedule", "learning rate in a tensor", "accumulation", "awkward", "manual")


@pytest.fixture(scope="module")
def trained() -> Callable[[str], list[Any]]:
    """What both workers have trained in a scenario; the quick ones are trained together, and the others."""
    found: dict[bool, list[dict[str, Any]]] = {}

    def of(name: str) -> list[Any]:
        quick = name in QUICK
        if quick not in found:
            names = [each for each in SCENARIOS if (each in QUICK) == quick]
            found[quick] = run_ranks(2, lambda rank: {each: three_ways(*SCENARIOS[each]) for each in names})
        return [results[name] for results in found[quick]]

    return of


@pytest.mark.costly(reason="the first of them trains all scenarios of the quick tests")
@pytest.mark.parametrize("name", quick_of(SCENARIOS, QUICK))
def test_same_as_settled_at_once_and_as_ddp(trained: Callable[[str], list[Any]], name: str) -> None:
    for ours, at_once, theirs in trained(name):
        for key in ("weights", "states"):
            for mine, settled, ddp in zip(ours[key], at_once[key], theirs[key], strict=True):
                assert mine.dtype == settled.dtype
                assert torch.equal(mine, settled)
                torch.testing.assert_close(mine, ddp, rtol=1e-5, atol=1e-6)
        assert ours["groups"] == theirs["groups"]
        assert ours["validated"] == at_once["validated"]
        assert bool(ours["validated"]) == (name == "validation")


class Layers(LightningModule):
    """Notes, when a layer is about to run, which layers' gradients are still under way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8 * i, 8 * i + 8) for i in range(1, 5)])
        self.weights = [layer.weight for layer in self.layers]  # read without the model
        self.versions: list[int] = []  # at the end of the last forward pass: unchanged until the step is made
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.full((2, 8), 0.1 + self.global_rank)
        for layer in self.layers:
            self.note()
            x = layer(x)
        self.note()
        self.versions = [weight._version for weight in self.weights]
        return x.square().mean()

    def note(self) -> None:
        pairs = enumerate(zip(self.weights, self.versions, strict=False))
        self.seen.append([place for place, (weight, version) in pairs if weight._version == version])

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def watched(rank: int) -> tuple[list[list[int]], list[int]]:
    """What the layers note, and the sizes of all-gathers in the order in which they are launched in the last step."""
    model, gathered = Layers(), []

    def listen(trainer: Trainer) -> None:
        transport: Any = trainer.strategy._fit.transport  # type: ignore[attr-defined]  # of SAFusionStrategy
        launch = transport.all_gather
        transport.all_gather = lambda output, piece: gathered.append(output.numel()) or launch(output, piece)

    run(dear(), 4, At(3, listen), model=model)
    return model.seen, gathered


def test_every_layer_waits_for_its_own_bucket_only() -> None:
    for seen, gathered in run_ranks(2, watched):
        # buckets of a layer, or of its weight and its bias, in two shares of whole lines of 32 elements
        assert gathered == [64 * -(-numel // 64) for numel in (144, 408, 768, 32, 1280, 40)]
        steps = [seen[i : i + 5] for i in range(0, 20, 5)]
        assert steps[0] == [[]] * 5
        assert steps[1] == [[0, 1, 2, 3], [], [], [], []]  # DDP's first bucket holds everything
        assert steps[2:] == [[[0, 1, 2, 3], [1, 2, 3], [2, 3], [3], []]] * 2


def saved(rank: int, folder: Path) -> list[Any]:
    """A checkpoint in mid epoch: what it holds, and where a run resumed from it ends."""

    whole = run(dear(), 5, saving(folder / "third.ckpt", 3), model=Model(groups_and_schedule))
    stopped = run(dear(), 3, model=Model(groups_and_schedule))
    resumed = run(dear(), 5, model=Model(groups_and_schedule), ckpt=folder / "third.ckpt")
    return [stepped(job) | {"state": job.lightning_module.state_dict()} for job in (whole, stopped, resumed)]


def test_checkpoints_hold_settled_weights_and_resume_bitwise(tmp_path: Path) -> None:
    for whole, stopped, resumed in run_ranks(2, saved, tmp_path):
        checkpoint = torch.load(tmp_path / "third.ckpt", weights_only=False)
        assert all(torch.equal(checkpoint["state_dict"][name], value) for name, value in stopped["state"].items())
        states = checkpoint["optimizer_states"][0]["state"]
        tensors = [value for place in sorted(states) for value in states[place].values()]
        assert all(torch.equal(mine, other) for mine, other in zip(tensors, stopped["states"], strict=True))
        for key in ("weights", "states"):
            assert all(torch.equal(mine, other) for mine, other in zip(whole[key], resumed[key], strict=True))


class Fails(Model):
    """In its last step, before the forward pass or after it."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 3 and self.early:
            raise ArithmeticError("no more")
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 3:
            raise ArithmeticError("no more")
        return loss


def failed(rank: int) -> list[list[Tensor]]:
    results = []
    for model in (Fails(early=False), Fails(early=True)):
        with pytest.raises(ArithmeticError, match="no more"):
            run(dear(), 5, model=model)
        assert all(type(module._parameters) is dict for module in model.modules())
        results.append([p.detach().clone() for p in model.parameters()])
    results.append(parameters(run(ddp(), 3, model=Model())))
    return results


def test_the_last_step_before_an_error_is_not_lost() -> None:
    for in_forward, before, ddp in run_ranks(2, failed):
        assert all(torch.equal(mine, other) for mine, other in zip(in_forward, ddp, strict=True))
        assert all(torch.equal(mine, other) for mine, other in zip(before, ddp, strict=True))


def settle(trainer: Trainer) -> None:
    with torch.inference_mode():  # of which nothing may stay in the optimizer
        trainer.strategy.settle()


def ask_for_state(trainer: Trainer) -> None:
    trainer.strategy.optimizer_state(trainer.optimizers[0])


def kept(rank: int, how: Callable[[Trainer], None]) -> list[list[Tensor]]:
    """Weights in a list outside of the model after the first step, and after it is settled; those after the third."""
    model = Model(adam)
    own, found = list(model.parameters()), []

    def look(trainer: Trainer) -> None:
        found.append([p.detach().clone() for p in own])
        how(trainer)
        found.append([p.detach().clone() for p in own])

    run(dear(), 3, At(1, look), model=model)
    found.append(parameters(run(ddp(), 1, model=Model(adam))))
    return found


@pytest.mark.parametrize("how", [settle, ask_for_state])
def test_those_who_keep_parameters_can_have_them_settled(how: Callable[[Trainer], None]) -> None:
    for found, settled, ddp in run_ranks(2, kept, how):
        assert not any(torch.equal(mine, other) for mine, other in zip(found, ddp, strict=True))
        assert all(torch.equal(mine, other) for mine, other in zip(settled, ddp, strict=True))


class Clips(Model):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


class LooksAtGradients(Model):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """As the parameters of its groups may be asked for their gradients."""


def hooked(params: Any) -> Optimizer:
    optimizer = torch.optim.SGD(params, 0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def compiled() -> LightningModule:
    model = Model()
    model.hidden.compile(backend="eager")
    return model


def decorated() -> LightningModule:
    model = Model()
    model.penalty = torch.compile(lambda: 0.0, backend="eager")  # type: ignore[assignment]  # a function, not a module
    return model


REASONS: dict[str, tuple[Callable[[], Any], tuple[Callback, ...], dict[str, Any]]] = {
    "gradients are clipped": (Model, (), {"gradient_clip_val": 1.0}),
    "clipped": (Clips, (), {}),
    "LooksAtGradients.on_before_optimizer_step may look": (LooksAtGradients, (), {}),
    "ReadsGradients.on_after_backward may look": (Model, (ReadsGradients(),), {}),
    "OwnSGD is not known to treat every parameter by itself": (lambda: Model(lambda p: OwnSGD(p, 0.1)), (), {}),
    "SGD has step hooks": (lambda: Model(hooked), (), {}),
    "optimization is manual": (Manual, (), {}),
    "the model is compiled": (compiled, (), {}),
    "is compiled": (decorated, (), {}),
    "its uses of parameters cannot be seen": (lambda: torch.compile(Model(), backend="eager"), (), {}),
}


def told(rank: int, name: str) -> list[str]:
    build, callbacks, options = REASONS[name]
    said = Lines()
    run(dear(bucket_cap_mb=25), 3, *callbacks, model=build(), **options)
    return [text for text in said.lines if "averaged when a backward pass ends" in text]


@pytest.mark.parametrize("name", quick_of(REASONS, ("clipped", "SGD has step hooks", "optimization is manual")))
def test_says_once_why_it_settles_at_once(name: str, request: pytest.FixtureRequest) -> None:
    if "compiled" in name or "cannot be seen" in name:
        request.getfixturevalue("compiler")
    (said,) = run_ranks(2, told, name)[0]
    assert name in said


class KeepsItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept[0]


def test_a_watch_sees_every_use() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 3),
            "lstm": nn.LSTM(2, 3),
            "gains": nn.ParameterList([torch.ones(2)]),
            "keeps": KeepsItsOwn(),
        }
    )
    names = {id(param): name for name, param in model.named_parameters()}
    used: list[str] = []
    watch = ParameterWatch(model, lambda param: used.append(names[id(param)]))

    def uses(use: Callable[[], Any]) -> set[str]:
        used.clear()
        use()
        return set(used)

    linear: Any = model["linear"]
    everything, recurrent = set(names.values()), {name for name in names.values() if name.startswith("lstm.")}
    assert uses(lambda: linear.bias) == {"linear.bias"}
    assert uses(lambda: linear(torch.ones(2))) == {"linear.weight", "linear.bias"}
    assert uses(lambda: model["lstm"](torch.ones(1, 1, 2))) == recurrent
    assert uses(lambda: model["keeps"](torch.ones(2))) == {"keeps.weight"}
    assert uses(lambda: model["gains"][0]) == {"gains.0"}  # type: ignore[index]  # a ParameterList
    assert uses(lambda: list(model.parameters())) == everything
    assert uses(model.state_dict) == everything
    assert uses(model.double) == everything
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301  # our own bytes
    assert uses(lambda: [list(other.parameters()) for other in copies]) == set()
    watch.close()
    assert uses(lambda: linear(torch.ones(2).double())) == uses(model.state_dict) == set()
    assert type(linear._parameters) is dict
    assert not linear._forward_pre_hooks
