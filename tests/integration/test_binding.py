"""What the strategy is bound to: optimizers that come and go, and parameters that none of them has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration import fit as fit_module
from lightning_safusion.integration.optimizer import needs_plain_ddp
from lightning_safusion.integration.parameters import describe_untrained, members, untrained
from tests.models import classification, trainer, weights
from tests.process_group import run_launched

SPARSE: dict[str, Any] = {"density": 0.05, "collective": "allgather", "memory": "residual"}


class Net(LightningModule):
    """A parameter that the optimizer has not, and whose gradient is never finite; notes what happens in every step."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = automatic
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.probe = nn.Parameter(torch.zeros(3))
        self.steps: list[tuple[int, int, Tensor | None]] = []
        self.own: list[Tensor] = []  # this rank's gradients of the parameter

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss + 0 * self.probe.pow(2).sum().sqrt()  # at zero its gradient is NaN
        self.probe.grad = None
        self.own.append(batch[0][:, :3].mean(0))
        self.manual_backward(loss + (self.probe * self.own[-1]).sum())
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        record = self.trainer.strategy.record
        bypassed = -1 if record is None else int(record._window.bypass.sum())
        grad = None if self.probe.grad is None else self.probe.grad.clone()
        self.steps.append((len(self.trainer.strategy.gradient_specs(self)), bypassed, grad))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.05)


def fit(rank: int, model: LightningModule, density: Any = 0.05, **options: Any) -> Any:
    """Trains on this rank for eight steps: what was noted, and the parameters."""
    said: list[str] = []
    fit_module.announce = said.append  # type: ignore[assignment]  # in a process of its own
    strategy = SAFusionStrategy(**(SPARSE | {"density": density}))
    trainer(strategy, max_epochs=2, **options).fit(model, classification(128))
    return model.steps, weights(model), said, model.own


def assert_replicas_equal(results: list[Any]) -> None:
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_a_parameter_that_no_optimizer_has_is_not_exchanged_and_vetoes_nothing() -> None:
    results = run_launched(2, lambda rank: fit(rank, Net()))
    assert_replicas_equal(results)
    for steps, _, said, _ in results:
        assert [exchanged for exchanged, _, _ in steps] == [4] * 8
        assert all(grad is not None and not grad.any() for _, _, grad in steps)
        assert sum("probe is in no optimizer (3 elements): its gradient is not exchanged" in line for line in said) == 1


@pytest.mark.slow
def test_under_manual_optimization_it_is_averaged_as_ddp_does() -> None:
    ours = run_launched(2, lambda rank: fit(rank, Net(automatic=False)))
    assert_replicas_equal(ours)
    for step, (_, _, grad) in enumerate(ours[0][0]):
        torch.testing.assert_close(grad, (ours[0][3][step] + ours[1][3][step]) / 2)
        assert torch.equal(grad, ours[1][0][step][2])


def test_one_that_is_not_used_either_is_named() -> None:
    class Unused(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def error(rank: int) -> str:
        with pytest.raises(RuntimeError, match="got no gradient") as caught:
            fit(rank, Unused())
        return str(caught.value)

    assert all("1 parameters got no gradient in this backward pass: probe" in each for each in run_launched(2, error))


class Changes(Net):
    """The optimizer is replaced in the second epoch, and one that has the last parameter comes in its fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        optimizer = self.trainer.optimizers[0]
        if self.current_epoch == 1 and batch_idx == 2:
            copy.deepcopy(self.trainer.model)
            copy.deepcopy(self.trainer.strategy)
            optimizer.add_param_group({"params": [self.probe]})
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss + self.probe.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9 if self.current_epoch else 0.0)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


def test_optimizers_may_be_replaced_and_get_groups_in_training() -> None:
    results = run_launched(2, lambda rank: fit(rank, Changes()))
    assert_replicas_equal(results)
    for steps, *_ in results:
        assert [exchanged for exchanged, _, _ in steps] == [4] * 6 + [5] * 2  # from the batch after it was added
        assert all(bypassed == 0 for _, bypassed, _ in steps), "gradients went through dense all-reduces"


def test_who_is_bound() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert untrained(module, []) == []
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    assert untrained(module, [other]) == []  # something else trains it
    optimizer = torch.optim.SGD(module[0].parameters(), 0.1)
    left = untrained(module, [optimizer])
    assert [name for name, _ in left] == ["1.weight", "1.bias"]
    line = describe_untrained(left, automatic=True)
    assert line.startswith("2 parameters (1.weight, 1.bias) are in no optimizer (6 elements)")
    assert "averaged uncompressed" in describe_untrained(left[:1], automatic=False)
    added = list(module[1].parameters())
    assert members([other, optimizer]) == [*members([other]), optimizer, None, *module[0].parameters()]
    optimizer.add_param_group({"params": added})
    assert members([optimizer]) == [optimizer, None, *module[0].parameters(), None, *added]
    assert needs_plain_ddp([optimizer]) is None
    assert needs_plain_ddp([torch.optim.LBFGS(module.parameters())]) is not None
