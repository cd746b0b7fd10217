"""What Lightning's own tests ask of its DDP strategy, asked of this one on two CPU workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from lightning_safusion import SAFusionStrategy
from tests.models import CompilesWrapped, TinyClassifier, classification, distance, equal, fit, trainer, weights
from tests.process_group import run_launched

SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather"}


class Observed(TinyClassifier):
    """Notes what it sees, and differs between ranks before training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        self.seen["initialized"] = dist.is_initialized()
        if stage == "fit":
            with torch.no_grad():
                self.net[0].weight.add_(self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.seen["broadcast before optimizers"] = self.equal_on_all_ranks(self.net[0].weight.detach())
        return super().configure_optimizers()

    def wrapped(self) -> bool:
        return isinstance(self.trainer.strategy.model, DistributedDataParallel)

    def equal_on_all_ranks(self, tensor: Tensor) -> bool:
        everyone = self.all_gather(tensor)
        return bool((everyone == everyone[0]).all())

    def on_train_start(self) -> None:
        self.seen["broadcast"] = self.equal_on_all_ranks(self.net[0].weight.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["wrapped"] = self.wrapped()
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        together = self.all_gather(loss, sync_grads=True)
        self.seen["gathered"] = tuple(together.shape)
        return 0.5 * loss + 0.5 * together.mean()

    def on_after_backward(self) -> None:
        self.seen["final after backward"] = self.equal_on_all_ranks(self.net[0].weight.grad)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen["final when clipped"] = self.equal_on_all_ranks(self.net[3].weight.grad)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val", loss + self.global_rank, sync_dist=True)
        self.seen.setdefault("wrapped in validation", self.wrapped())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["wrapped in test"] = self.wrapped()
        self.log("test", float(self.global_rank), sync_dist=True)


@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated:FutureWarning")  # Lightning's, in torch 2.13
def test_hooks_and_collectives(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[dict[str, Any], dict[str, float]]:
        model, data = Observed(), classification()
        stop = EarlyStopping("val", patience=1, stopping_threshold=None, min_delta=100.0)
        options: dict[str, Any] = {"callbacks": [stop, ModelCheckpoint(tmp_path, monitor="val")]}
        options |= {"max_epochs": 5, "limit_train_batches": 4, "num_sanity_val_steps": 0}
        fitted = trainer(SAFusionStrategy(**SPARSE), enable_checkpointing=True, **options)
        fitted.fit(model, data, data)
        model.seen["epochs"] = fitted.current_epoch
        model.seen["sampler"] = type(fitted.train_dataloader.sampler).__name__
        metrics = {name: float(value) for name, value in fitted.callback_metrics.items()}
        metrics |= fitted.test(model, data, ckpt_path="best", verbose=False)[0]
        return model.seen, metrics

    (first, metrics), (second, others) = run_launched(2, run)
    assert first == second
    assert first == {
        "initialized": True,
        "wrapped": True,
        "wrapped in validation": True,  # inside fit
        "wrapped in test": False,
        "broadcast before optimizers": True,
        "broadcast": True,
        "gathered": (2,),
        "final after backward": True,
        "final when clipped": True,
        "epochs": 2,  # stopped by both
        "sampler": DistributedSampler.__name__,
    }
    assert metrics == others
    assert metrics["test"] == 0.5


def test_the_strategys_own_collectives() -> None:
    def run(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        class Asks(TinyClassifier):
            def on_train_start(self) -> None:
                strategy = self.trainer.strategy
                found["mean"] = float(strategy.reduce(torch.tensor(float(rank)), reduce_op="mean"))
                found["sum"] = float(strategy.reduce(torch.tensor(float(rank)), reduce_op="sum"))
                found["broadcast"] = strategy.broadcast({"from": rank})
                found["all"] = strategy.reduce_boolean_decision(rank == 0)
                found["any"] = strategy.reduce_boolean_decision(rank == 0, all=False)
                strategy.barrier()
                found["sampler"] = strategy.distributed_sampler_kwargs

        fit(SAFusionStrategy(**SPARSE), Asks(), limit_train_batches=1)
        return found

    for rank, found in enumerate(run_launched(2, run)):
        assert found == {
            "mean": 0.5,
            "sum": 1.0,
            "broadcast": {"from": 0},
            "all": False,
            "any": True,
            "sampler": {"num_replicas": 2, "rank": rank},
        }


def test_ignored_parameters_are_left_alone() -> None:
    def run(rank: int) -> tuple[Tensor, list[str]]:
        model = TinyClassifier()
        model._ddp_params_and_buffers_to_ignore = ["net.0.bias"]
        names: list[str] = []

        class Names(SAFusionStrategy):
            def _register_ddp_hooks(self) -> None:
                super()._register_ddp_hooks()
                names.extend(spec.name for spec in self.engine.space.layout.specs)

        fit(Names(**SPARSE), model, limit_train_batches=4)
        return model.net[0].bias.detach(), names

    (first, names), (second, _) = run_launched(2, run)
    assert "net.0.bias" not in names
    assert "temperature" in names
    assert not torch.equal(first, second)  # trained on local gradients, as in DDP


class Compilable(TinyClassifier):
    """Can be compiled without a break of the graph; under manual optimization with its backward pass."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.both_passes(batch)
        optimizer.step()
        return None

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def both_passes(self, batch: Any) -> None:
        self.manual_backward(self.loss(batch))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("place", ["model", "submodule", "wrapped", "both passes"])
def test_compiled_models(place: str) -> None:
    """With a backend that needs no compiler: what is tested is how graphs, buckets and hooks meet."""

    def train(strategy: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model: LightningModule = Compilable(manual=place == "both passes")
        if place == "submodule":
            model.net = torch.compile(model.net, backend="aot_eager")
        if place == "both passes":  # Dynamo is active when DDP calls the communication hook
            model.both_passes = torch.compile(model.both_passes, backend="aot_eager")
        whole = torch.compile(model, backend="aot_eager") if place == "model" else model
        callbacks = [CompilesWrapped()] if place == "wrapped" else []
        fit(strategy, whole, limit_train_batches=3, callbacks=callbacks)
        return weights(model)

    def run(rank: int) -> tuple[float, list[Tensor]]:
        apart = distance(train(SAFusionStrategy(density=1.0, collective="allgather")), train("ddp"))
        return apart, train(SAFusionStrategy(density=0.05, collective="allgather"))

    (difference, first), (other, second) = run_launched(2, run, timeout=120)
    assert max(difference, other) < 2e-6
    assert equal(first, second)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_missing_parameter_is_named_where_the_wrapped_model_is_compiled() -> None:
    def run(rank: int) -> None:
        torch._dynamo.reset()
        model = Compilable()
        model.spare = nn.Linear(3, 3)
        said = "2 parameters got no gradient in this backward pass: spare.weight, spare.bias"
        with pytest.raises(RuntimeError, match=said):
            fit(SAFusionStrategy(**SPARSE), model, callbacks=[CompilesWrapped()])

    run_launched(2, run, timeout=120)
