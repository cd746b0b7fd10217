"""ReplicaConsistencyCheck in real trainings in which one rank changes something by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_safusion import Aligned, SAFusionStrategy
from lightning_safusion.callbacks import ReplicaConsistencyCheck
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched


class Break(Callback):
    """Changes something on one rank, after a number of steps and before the check.

    Args:
        change: Called with the trainer and the model.
        rank: Where.
        step: When.
    """

    def __init__(self, change: Callable[[Trainer, Any], None], rank: int = 1, step: int = 3) -> None:
        self.change, self.rank, self.step = change, rank, step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            with torch.no_grad():
                self.change(trainer, pl_module)


def fit(
    check: ReplicaConsistencyCheck, *before: Callback, model: LightningModule | None = None, **options: Any
) -> str | None:
    """Trains, and returns the error that ended it."""
    system = {"density": 0.05, "process_group_backend": "gloo", "fusion": Aligned(4), "collective": "allgather"}
    chosen = SAFusionStrategy(**(system | options.pop("strategy", {})))
    fitting = trainer(chosen, callbacks=[*before, check], **({"limit_train_batches": 8} | options))
    try:
        fitting.fit(model or TinyClassifier(), classification())
    except RuntimeError as error:
        return str(error)
    return None


def warned(check: ReplicaConsistencyCheck, *before: Callback, **options: Any) -> tuple[str | None, list[str]]:
    """The error of a training, and its warnings of replicas that differ."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = fit(check, *before, **options)
    return error, [str(w.message) for w in caught if "replicas differ" in str(w.message)]


def everywhere(*before: Callback, world_size: int = 2, **options: Any) -> str:
    """The error of a training with a check after every step, which must be the same on all ranks; empty without one."""
    model = options.pop("model", TinyClassifier)
    check = options.pop("check", {})

    def each(rank: int) -> str | None:
        return fit(ReplicaConsistencyCheck(**({"every_n_steps": 1} | check)), *before, model=model(), **options)

    errors = run_launched(world_size, each)
    assert len(set(errors)) == 1
    return errors[0] or ""


class Everything(TinyClassifier):
    """Parameters of every kind: complex, half, tied, empty, frozen, integer, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.phase = nn.Parameter(torch.randn(32, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.randn(32).to(torch.bfloat16))
        self.tied = self.narrow
        self.empty = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.full((4,), torch.nan), requires_grad=False)
        self.number = nn.Parameter(torch.arange(3), requires_grad=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        rotated = (self.norm(x) * self.phase).real + self.narrow.float() + self.empty.sum()
        return super().forward(rotated)


def test_replicas_stay_equal() -> None:
    def each(rank: int) -> list[str | None]:
        strategies: list[dict[str, Any]] = [{}, {"system": "behind", "memory": "none"}, {"density": 1.0}]
        check = partial(ReplicaConsistencyCheck, every_n_steps=1, optimizer_state=True)
        return [fit(check(), strategy=chosen, accumulate_grad_batches=2) for chosen in strategies]

    assert run_launched(2, each) == [[None] * 3] * 2


def test_parameters_of_every_kind_are_compared() -> None:
    assert not everywhere(model=Everything, check={"optimizer_state": True})

    def change(trainer: Trainer, model: Any) -> None:
        model.frozen[2] = 7.0

    error = everywhere(Break(change), model=Everything)
    assert "parameter frozen on rank 1" in error
    assert "(largest difference nan)" in error


def test_the_first_tensor_and_the_ranks_are_named() -> None:
    def more(trainer: Trainer, model: Any) -> None:
        model.net[0].bias.fill_(1.25)
        model.net[3].weight.zero_()

    def less(trainer: Trainer, model: Any) -> None:
        model.net[0].bias.fill_(0.5)

    def one(trainer: Trainer, model: Any) -> None:
        model.net[0].bias.fill_(1.0)

    breaks = [Break(one, rank=0), Break(more, rank=1), Break(less, rank=2)]
    error = everywhere(*breaks, world_size=3, devices=3)
    expected = "The replicas differ after step 3: parameter net.0.bias on rank 1, 2 is not that of rank 0 (largest"
    assert error.startswith(expected)
    assert "difference 0.5); 2 of 7 tensors differ" in error


def test_an_update_that_one_rank_makes_alone_is_found_at_the_next_check() -> None:
    def change(trainer: Trainer, model: Any) -> None:
        model.net[1].weight += 0.5

    error = everywhere(Break(change, rank=0), check={"every_n_steps": 6})
    assert "after step 6" in error
    assert "parameter net.1.weight on rank 1 is not that of rank 0" in error
    short = everywhere(Break(change), check={"every_n_steps": 100})
    assert "after step 8" in short  # at the end


def test_training_continues_after_a_warning() -> None:
    def change(trainer: Trainer, model: Any) -> None:
        model.temperature += 1

    def each(rank: int) -> Any:
        check = ReplicaConsistencyCheck(every_n_steps=2, action="warn")
        said = warned(check, Break(change))
        return check.checks, said

    (checks, (error, texts)), (others, _) = run_launched(2, each)
    assert error is None
    assert checks == others == 4
    assert [text.split(":")[0] for text in texts] == [f"The replicas differ after step {step}" for step in (4, 6, 8)]


def test_healed_replicas_are_equal_to_the_last_bit() -> None:
    def change(trainer: Trainer, model: Any) -> None:
        model.net[0].bias += 1
        model.phase[3] += 1j
        model.norm.running_var += 1
        states = trainer.optimizers[0].state
        states[model.net[3].bias]["momentum_buffer"][0] += 1
        del states[model.temperature]

    def each(rank: int) -> Any:
        heals = ReplicaConsistencyCheck(every_n_steps=1, optimizer_state=True, action="heal")
        looks = ReplicaConsistencyCheck(every_n_steps=3, optimizer_state=True, buffers=True)
        # one after the other: a difference that is left would be an error
        error, texts = warned(looks, Break(change), heals, model=Everything(), limit_train_batches=3)
        return error, looks.checks, texts

    (error, checks, texts), (other, *_) = run_launched(2, each)
    assert error is other is None
    assert checks == 1
    (text,) = texts
    assert text.startswith("The replicas differ after step 3: parameter phase on rank 1 is not that of rank 0")
    assert text.endswith("of rank 0 have been copied to all ranks.")


def test_optimizer_state_and_buffers_are_compared_on_request() -> None:
    def change(trainer: Trainer, model: Any) -> None:
        trainer.optimizers[0].state[model.net[3].bias]["momentum_buffer"][0] += 1

    # training ends before the parameters follow
    assert not everywhere(Break(change), max_steps=3)
    error = everywhere(Break(change), max_steps=3, check={"optimizer_state": True})
    assert "momentum_buffer of net.3.bias in optimizer 0 on rank 1" in error
    assert "(largest difference 1)" in error

    error = everywhere(model=Everything, check={"buffers": True}, limit_train_batches=2)
    assert "buffer norm.running_mean on rank 1" in error


def test_state_that_one_rank_lacks_is_named_and_no_rank_hangs() -> None:
    def forget(trainer: Trainer, model: Any) -> None:
        del trainer.optimizers[0].state[model.temperature]

    error = everywhere(Break(forget), max_steps=3, check={"optimizer_state": True})
    assert "momentum_buffer of temperature in optimizer 0 on rank 1 is not that of rank 0 (missing" in error


class Local(TinyClassifier):
    """Has tensors that DDP is configured to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.own.register_buffer("count", torch.zeros(1))
        ignored = ["own.weight", "own.bias", "own.count"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)


def test_what_ddp_ignores_is_left_out() -> None:
    def change(trainer: Trainer, model: Any) -> None:
        model.own.weight.zero_()
        model.own.count += 1

    assert not everywhere(Break(change), model=Local, check={"buffers": True})


def test_a_process_alone_is_equal_to_itself() -> None:
    check = ReplicaConsistencyCheck(every_n_steps=2)
    assert fit(check, devices=1) is None
    assert check.checks == 4


def test_a_second_fit_goes_on_counting_steps() -> None:
    check = ReplicaConsistencyCheck(every_n_steps=5)
    fitting = trainer(SAFusionStrategy(), devices=1, callbacks=[check], limit_train_batches=8)
    counts = []
    for epochs in (1, 2):
        fitting.fit_loop.max_epochs = epochs
        fitting.fit(TinyClassifier(), classification())
        counts.append(check.checks)
    assert counts == [2, 3]  # after steps 5 and 8; 10, 15 and 16
