"""Whether all ranks hold the same model: a callback that compares checksums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_safusion.callbacks.base import StrategyCallback, check_every
from lightning_safusion.metrics.checksum import (
    Checksums,
    Difference,
    first_difference,
    largest_difference,
    raw_bytes,
)


class ReplicaConsistencyCheck(StrategyCallback):
    """Compares the parameters of all ranks bit by bit every few steps, and names the first tensor that differs.

    Data parallel ranks begin with equal parameters and apply equal updates. A rank that changes something by itself
    (code for rank 0 only, a random number, a faulty device) trains another model from then on, and nothing else
    notices. A check makes one pass over the tensors and reduces two numbers; more is sent only when they differ. It
    also runs once at the end of training.

    NaNs with equal bits are equal. Buffers are left out by default: DDP gives rank 0's to all ranks at the beginning
    of each forward pass, and the running statistics of BatchNorm differ in between. What DDP was told to ignore is
    left out too. It logs nothing.

    Args:
        every_n_steps: Optimizer steps from one check to the next.
        optimizer_state: Also compare the state of the optimizers; not with one that is sharded over ranks.
        buffers: Also compare the buffers of the model.
        action: ``"raise"`` ends training on all ranks, ``"warn"`` goes on.

    Attributes:
        checks: Number of checks in this fit.

    Raises:
        ValueError: If ``every_n_steps`` is below 1 or there is no such ``action``.

    Example::

        Trainer(strategy="safusion", callbacks=[ReplicaConsistencyCheck(every_n_steps=500, optimizer_state=True)])
    """

    _purpose = "compares the replicas of"

    def __init__(
        self,
        every_n_steps: int = 500,
        optimizer_state: bool = False,
        buffers: bool = False,
        action: Literal["raise", "warn"] = "raise",
    ) -> None:
        if action not in ("raise", "warn"):
            raise ValueError(f"action must be 'raise' or 'warn', got {action!r}")
        self.every_n_steps = check_every(every_n_steps)
        self.optimizer_state = optimizer_state
        self.buffers = buffers
        self.action = action
        self.checks = 0
        self._checked = 0  # step of the latest check

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checks, self._checked = 0, trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step // self.every_n_steps > self._checked // self.every_n_steps:
            self._check(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._checked:
            self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        self.checks += 1
        self._checked = trainer.global_step
        if trainer.world_size == 1:
            return
        tensors = dict(self._tensors(trainer, module))
        mine = Checksums.of(tensors.items())
        digest = mine.digest()
        device = trainer.strategy.root_device
        reduced = trainer.strategy.reduce(torch.tensor([digest, -digest], device=device), reduce_op="max")
        largest, smallest = reduced[0].item(), -reduced[1].item()
        if largest == smallest:
            return
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, mine)
        difference = first_difference(everyone)
        distance = _distance(difference, tensors.get(difference.name), device)
        text = f"The replicas differ after step {trainer.global_step}: {_describe(difference, distance)}."
        if self.action == "raise":
            raise RuntimeError(text)
        rank_zero_warn(text)

    def _tensors(self, trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        # DDP compares "module.parameter", which begins with a dot for parameters of the root
        named = [
            (name, p) for name, p in module.named_parameters() if (name if "." in name else f".{name}") not in ignored
        ]
        kept: dict[Tensor, str] = {p: name for name, p in named}
        for param, name in kept.items():
            yield f"parameter {name}", param
        if self.buffers:
            for name, buffer in module.named_buffers():
                if name not in ignored:
                    yield f"buffer {name}", buffer
        if self.optimizer_state:
            for place, optimizer in enumerate(trainer.optimizers):
                for param, state in optimizer.state.items():
                    if param in kept:
                        yield from _state(f"of {kept[param]} in optimizer {place}", state)


def _state(owner: str, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors and numbers of a parameter's state."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{key} {owner}", value
        elif isinstance(value, (int, float)):
            yield f"{key} {owner}", torch.tensor(value, dtype=torch.float64)


def _distance(difference: Difference, mine: Tensor | None, device: torch.device) -> float | None:
    """Largest absolute difference from the common version, over all ranks; None if there is no such thing."""
    if not difference.comparable or mine is None:
        return None
    # raw bytes: not every backend sends every dtype
    sent = raw_bytes(mine).to(device, copy=True)
    dist.broadcast(sent, src=difference.others[0])
    flat = sent.view(mine.dtype).to(mine.device)
    distances: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(distances, largest_difference(mine.detach().reshape(-1), flat))
    return float("nan") if any(value != value for value in distances) else max(distances)


def _describe(difference: Difference, distance: float | None) -> str:
    ranks, others = (", ".join(map(str, each)) for each in (difference.ranks, difference.others))
    text = f"{difference.name} on rank {ranks} is not that of rank {others}"
    text += " (missing, or of another shape or dtype)" if distance is None else f" (largest difference {distance:g})"
    return (
        f"{text}; {difference.count} of {difference.total} tensors differ. Look for code that changes the model on "
        "some ranks only, for random numbers in the update, and for parameters that DDP does not know"
    )
