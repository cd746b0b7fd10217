"""Parameters that are frozen or unfrozen during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_safusion import SAFusionStrategy
from lightning_safusion.fusion.state import local_state
from tests.ledger import Ledger, assert_balanced
from tests.models import CompilesWrapped, TinyClassifier, classification, distance, equal, trainer, weights
from tests.process_group import run_launched

SPARSE: dict[str, Any] = {"density": 0.05, "collective": "allgather"}
UNUSED: dict[str, Any] = {"find_unused_parameters": True}


class Finetuned(LightningModule):
    """Its backbone is trained from the second epoch on: by unfreezing, or (for a control) by a learning rate of 0
    before."""

    def __init__(self, freeze: bool, freeze_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.freeze, self.freeze_head = freeze, freeze_head
        self.backbone, self.head = nn.Linear(32, 48), nn.Linear(48, 10)
        if freeze:
            self.backbone.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0]).tanh()), batch[1])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.optimizers().param_groups[0]["lr"] = 0.1
        if self.current_epoch == 2 and self.freeze_head:
            self.head.requires_grad_(False)
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": self.backbone.parameters(), "lr": 0.0}, {"params": self.head.parameters(), "lr": 0.1}]
        return torch.optim.SGD(groups)


class Mass(Callback):
    """The residual of the head around the epoch in which the model is wrapped again."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and trainer.current_epoch == 1:
            self.note(trainer)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if len(self.held) == 1:
            self.note(trainer)

    def note(self, trainer: Trainer) -> None:
        self.held.append(residuals(trainer)["head.weight"])


def residuals(trainer: Trainer) -> dict[str, Tensor]:
    held = local_state(trainer.strategy.engine)["memory"]["residual"]
    return {name: tensor.clone() for name, tensor in held.items()}


def train(strategy: Any, callbacks: Any = (), **options: Any) -> list[Tensor]:
    model = Finetuned(**options)
    run = trainer(strategy, max_epochs=3, limit_train_batches=5, callbacks=list(callbacks))
    run.fit(model, classification())
    return weights(model)


def distance_from_ddp(*callbacks: Callback) -> float:
    """Largest difference of a parameter that is unfrozen from one that never was, in DDP."""
    plain = train(DDPStrategy(), freeze=False)
    ours = train(SAFusionStrategy(density=1.0, collective="allgather"), callbacks, freeze=True)
    return distance(ours, plain)


def test_unfrozen_parameters_are_exchanged() -> None:
    assert max(run_launched(2, lambda rank: distance_from_ddp())) <= 2e-6


@pytest.mark.parametrize(
    ("fusion", "freeze_head"),
    [
        pytest.param("adaptive", False, marks=pytest.mark.slow),
        ("adaptive", True),
        pytest.param("naive", True, marks=pytest.mark.slow),
        pytest.param("horovod", True, marks=pytest.mark.slow),
        pytest.param("selective", True, marks=pytest.mark.slow),
    ],
)
def test_residuals_are_kept_replicas_equal_and_nothing_is_lost(fusion: str, freeze_head: bool) -> None:
    def sparse(rank: int) -> tuple[list[Tensor], list[Tensor], Ledger]:
        mass, ledger = Mass(), Ledger()
        strategy = SAFusionStrategy(density=0.05, collective="allgather", fusion=fusion, dense_below=0)
        return train(strategy, [mass, ledger], freeze=True, freeze_head=freeze_head), mass.held, ledger

    (first, held, mine), (second, _, theirs) = run_launched(2, sparse)
    assert equal(first, second)
    assert held[0].abs().sum() > 0
    # one step later most of it is still there
    assert torch.nn.functional.cosine_similarity(held[0].flatten(), held[1].flatten(), dim=0) > 0.5
    # the residual of a tensor is forgotten when it is frozen
    names = [f"{module}.{kind}" for module in ("backbone", "head")[: 2 - freeze_head] for kind in ("weight", "bias")]
    assert_balanced(mine, theirs, to="used", names=names)


class ChangesAtStart(TinyClassifier):
    """Its first layer is frozen until the second epoch, or frozen whenever training starts."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.thaws = thaws
        self.net[0].requires_grad_(not thaws)

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(self.thaws and self.current_epoch >= 1)

    on_train_epoch_start = on_train_start


def test_a_change_before_an_epoch_that_is_resumed_in_its_middle_is_followed(tmp_path: Path) -> None:
    epochs: dict[str, Any] = {"max_epochs": -1, "limit_train_batches": 4}

    def resumed(thaws: bool) -> list[Tensor]:
        job = trainer(SAFusionStrategy(**SPARSE), max_steps=6, **epochs)
        job.fit(ChangesAtStart(thaws), classification())
        job.save_checkpoint(tmp_path / "middle.ckpt")
        model = ChangesAtStart(thaws)
        # some steps in the second epoch, before another epoch would set it right
        job = trainer(SAFusionStrategy(**SPARSE), max_steps=8, **epochs)
        job.fit(model, classification(), ckpt_path=tmp_path / "middle.ckpt")
        return weights(model)

    first, second = run_launched(2, lambda rank: resumed(True) + resumed(False))
    assert equal(first, second)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_unfreezing_is_followed_where_the_wrapped_model_is_compiled() -> None:
    class Notes(CompilesWrapped):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            compiled.append(isinstance(trainer.strategy.model, torch._dynamo.OptimizedModule))

    compiled: list[bool] = []

    def run(rank: int) -> tuple[float, list[bool]]:
        return distance_from_ddp(Notes()), compiled

    for difference, compiled_again in run_launched(2, run, timeout=120):
        assert difference <= 2e-6
        assert compiled_again == [True]


def test_ranks_that_unfreeze_different_parameters_are_told() -> None:
    class OneSided(Finetuned):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1 and self.global_rank == 1:
                self.backbone.requires_grad_(True)

    def run(rank: int) -> str:
        try:
            fitted = trainer(SAFusionStrategy(density=0.1), max_epochs=2, limit_train_batches=3)
            fitted.fit(OneSided(freeze=True), classification())
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("backbone.bias, backbone.weight" in message for message in run_launched(2, run))


class Rebuilt(Finetuned):
    """Gets a new head of the same name and shape between two epochs."""

    def __init__(self) -> None:
        super().__init__(freeze=False)
        self.held: dict[str, Tensor] = {}  # back when the new head is trained first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 0:
            self.held = residuals(self.trainer)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(7)
            self.head = nn.Linear(48, 10)
            optimizer = self.optimizers()
            optimizer.param_groups[1]["params"] = list(self.head.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": self.backbone.parameters()}, {"params": self.head.parameters()}], 0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layer_that_another_one_of_its_name_replaces_is_exchanged() -> None:
    def run(rank: int) -> tuple[Tensor, list[Tensor], dict[str, bool]]:
        model = Rebuilt()
        strategy = SAFusionStrategy(density=0.1, collective="allgather", dense_below=0)
        trainer(strategy, max_epochs=2, limit_train_batches=5).fit(model, classification())
        torch.manual_seed(7)
        held = {name: bool(tensor.any()) for name, tensor in model.held.items()}
        return nn.Linear(48, 10).weight.detach(), weights(model), held

    (start, first, held), (_, second, _) = run_launched(2, run)
    assert held == {"backbone.weight": True, "backbone.bias": True, "head.weight": False, "head.bias": False}
    assert equal(first, second)
    assert not torch.equal(start, first[2])


class MadeLate(TinyClassifier):
    """Gets a teacher, which no optimizer ever has, and a head, which has one from the middle of an epoch on."""

    def on_fit_start(self) -> None:
        self.head = nn.Linear(10, 10)
        self.teacher = torch.optim.swa_utils.AveragedModel(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x)) if self.global_step > 2 else super().forward(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.add_param_group({"params": list(self.head.parameters()), "lr": 0.1})


def test_what_was_made_after_the_model_was_wrapped_is_exchanged_if_an_optimizer_has_it() -> None:
    def run(rank: int) -> list[Tensor]:
        model = MadeLate()
        torch.manual_seed(4)
        trainer(SAFusionStrategy(**SPARSE), limit_train_batches=6).fit(model, classification())
        return weights(model.net) + weights(model.head)

    first, second = run_launched(2, run)
    assert equal(first, second)


class TakesTurns(LightningModule):
    """Two layers take turns. The first is frozen between two batches, as in many loops of GANs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.automatic_optimization = False
        self.first, self.last = nn.Linear(32, 16), nn.Linear(16, 10)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 1 and isinstance(self.trainer.strategy, SAFusionStrategy):
            self.trainer.strategy._fit.go_plain("this test says so")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for layer, other, optimizer in zip((self.first, self.last), (self.last, self.first), optimizers, strict=True):
            layer.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.last(self.first(batch[0])), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.first, self.last)]


def test_layers_that_take_turns_are_exchanged_in_every_epoch_and_by_plain_ddp() -> None:
    def run(rank: int) -> list[list[Tensor]]:
        ended = []
        for strategy in (SAFusionStrategy(density=1.0, collective="allgather", **UNUSED), DDPStrategy(**UNUSED)):
            model = TakesTurns()
            trainer(strategy, max_epochs=2, limit_train_batches=3).fit(model, classification())
            ended.append(weights(model))
        return ended

    (ours, plain), (others, _) = run_launched(2, run)
    assert equal(ours, others)
    assert distance(ours, plain) <= 2e-6
