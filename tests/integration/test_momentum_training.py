"""Training with a memory that carries the momentum of the optimizers: who sees it, and what it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_safusion import SAFusionStrategy
from lightning_safusion.sparsify import DecoupledMomentum
from tests.integration.test_checkpoint import ours
from tests.models import TinyClassifier, classification, equal, switched, trainer, weights
from tests.process_group import run_launched, run_ranks
from tests.resume import At, StepModel, parameters, run, saving

Make = Callable[[Any], Optimizer]
SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather"}


def adamw(beta1: float) -> TinyClassifier:
    model = TinyClassifier(make=lambda params: AdamW(params, 0.01, betas=(beta1, 0.99)))
    model.temperature.requires_grad_(False)  # one element is dense, and keeps its momentum
    return model


def fitted(model: TinyClassifier, **options: Any) -> tuple[list[Tensor], Any]:
    job = trainer(SAFusionStrategy(**(SPARSE | options)), max_steps=8)
    job.fit(model, classification())
    groups = [{**group, "params": None} for group in job.optimizers[0].param_groups]
    return weights(model), groups


def test_the_default_carries_the_momentum_of_adamw(caplog: pytest.LogCaptureFixture) -> None:
    def both(rank: int) -> Any:
        with caplog.at_level(logging.INFO):
            (default, groups), said = fitted(adamw(0.9)), caplog.text
        parts: dict[str, Any] = {"wire": "q4", "quota": "auto", "select_by": "update"}
        named = fitted(adamw(0.9), memory=DecoupledMomentum(0.975), **parts)[0]
        plain = fitted(adamw(0.9), memory="residual")[0]
        return default, named, plain, groups, said

    first, second = run_launched(2, both)
    default, named, plain, groups, said = first
    assert equal(default, named)
    assert equal(default, second[0])
    assert not equal(default, plain)
    assert groups[0]["betas"] == (0.9, 0.99)
    assert "AdamW leaves the momentum of sparse tensors to the residual (factor 0.975)" in said
    assert said.count("leaves the momentum") == 1


def test_dense_tensors_keep_the_momentum_of_their_optimizer() -> None:
    def both(rank: int) -> Any:
        everything = {"dense": ["*"], "collective": "allgather"}
        return fitted(adamw(0.9), **everything)[0], fitted(adamw(0.9), memory="residual", **everything)[0]

    carried, plain = run_launched(2, both)[0]
    assert equal(carried, plain)


class Steps(StepModel):
    """With AdamW."""

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), self.lr)


def _resumed(rank: int, folder: Path) -> Any:
    results = []
    for name, make, density in (("adamw", Steps, 0.1), ("sgd", StepModel, 0.02)):
        path = folder / f"{name}.ckpt"
        options = {"density": density, "memory": "auto", "collective": None}
        whole = run(ours(**options), 9, saving(path, 4), model=make(), deterministic=True)
        resumed = run(ours(**options), 9, ckpt=path, model=make(), deterministic=True)
        group = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"][0]
        same = equal(parameters(whole), parameters(resumed))
        results.append((same, group.get("betas", (group.get("momentum"),))[0], switched(whole)))
    return results


def test_a_resumed_run_carries_on_and_its_checkpoint_has_the_optimizer_as_made(tmp_path: Path) -> None:
    for results in run_ranks(2, _resumed, tmp_path, timeout=120):
        assert results == [(True, 0.9, 0), (True, 0.9, 0)]


def _interrupted(rank: int) -> Any:
    model = Steps()
    forward = model.training_step
    seen: list[Any] = []

    def step(batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise ValueError("boom")
        return forward(batch, batch_idx)

    model.training_step = step  # type: ignore[method-assign]
    during = At(2, lambda job: seen.append(switched(job)))
    with pytest.raises(ValueError, match="boom"):
        run(ours(memory="auto"), 9, during, model=model)
    optimizer = model.optimizers(use_pl_optimizer=False)
    return seen, optimizer.param_groups[0]["betas"][0], len(optimizer._optimizer_step_pre_hooks)


def test_a_failed_fit_leaves_the_optimizer_as_it_was_made() -> None:
    assert run_ranks(2, _interrupted) == [([1], 0.9, 0)] * 2


class Branched(StepModel):
    """A branch that rank 0 alone uses in odd steps, and no rank in even ones."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.branch, self.make = nn.Parameter(torch.zeros(500)), make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.002 * self.branch.sum() if self.global_step % 2 and self.global_rank == 0 else loss

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def _branched(rank: int) -> list[tuple[float, float]]:
    moved = []
    for make, density in (
        (lambda p: SGD(p, 0.001, momentum=0.9), 0.02),
        (lambda p: AdamW(p, 0.001, weight_decay=0.0), 0.1),
    ):
        models = [Branched(make), Branched(make)]
        for memory, model in zip(("residual", "auto"), models, strict=True):
            options = {"density": density, "memory": memory, "find_unused_parameters": True}
            run(ours(**options), 120, model=model)
        moved.append((float(models[0].branch.mean()), float(models[1].branch.mean())))
    return moved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tensors .* were computed on some ranks only")
def test_what_some_ranks_lack_moves_as_far_as_with_a_momentum() -> None:
    first, second = run_ranks(2, _branched, timeout=120)
    assert first == second
    for plain, carried in first:
        assert plain < 0
        assert carried == pytest.approx(plain, rel=0.3)  # plain momentum is still on its way


def test_another_optimizer_beside_it_keeps_what_it_has() -> None:
    class Both(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return [AdamW([first]), torch.optim.SGD(others, 0.01)]

    def fit(rank: int) -> tuple[int, int]:
        counts = []
        for memory in ("decoupled", "auto"):
            strategy = SAFusionStrategy(**SPARSE, memory=memory)
            watch = At(4, lambda job: counts.append(switched(job)))
            trainer(strategy, max_steps=8, callbacks=[watch]).fit(Both(), classification())
        return counts[0], counts[-1]

    assert run_launched(2, fit) == [(1, 0)] * 2
