"""What averages the gradients of a wrapped model: one protocol for the engine and for DDP's other hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.announce import MisconfigurationException
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration.optimizer import needs_plain_ddp


class Mode(Enum):
    """Who exchanges the gradients."""

    ENGINE = "the engine"
    DENSE_ENGINE = "the engine, which sends everything"
    HOOK = "DDP without the engine"
    PLAIN = "plain DDP"


@dataclass(frozen=True)
class Choice:
    """Who exchanges the gradients, and why it is not the engine at the density of the arguments."""

    mode: Mode
    reason: str | None = None  # to follow a "because"; None for the engine at that density

    @property
    def plain_ddp(self) -> str | None:
        """Why plain DDP is used; None with the engine."""
        return self.reason if self.mode in (Mode.PLAIN, Mode.HOOK) else None


def choose(
    settings: EngineSettings,
    specs: Sequence[TensorSpec],
    optimizers: Sequence[Optimizer],
    world_size: int,
    by_horovod: bool,
    engine_needed: bool,
    decided: str | None,
) -> Choice:
    """Decides whether the engine exchanges the gradients, the same on all ranks.

    The engine is needed for dense gradients as well where a checkpoint has a residual. What was ``decided`` before says
    why plain DDP takes the engine's place.

    Raises:
        MisconfigurationException: If optimizers need plain DDP, and Horovod carries the gradients.
    """
    if not specs:
        return Choice(Mode.PLAIN, "no parameter has a dense gradient")
    if decided is not None:
        return Choice(Mode.PLAIN, decided)
    if (reason := settings.dense_reason(specs, world_size)) is not None:
        # where Horovod carries the gradients, DDP's own group is for control messages only
        needed = engine_needed or (by_horovod and world_size > 1)
        return Choice(Mode.DENSE_ENGINE if needed else Mode.PLAIN, reason)
    if (reason := needs_plain_ddp(optimizers)) is None:
        return Choice(Mode.ENGINE)
    if by_horovod:
        raise MisconfigurationException(f"{reason}: with transport='horovod' use density=1.0.")
    return Choice(Mode.PLAIN, reason)


class GradientExchange:
    """Averages the gradients of a wrapped model. This one leaves all of it to DDP.

    Methods are called in the order of the Trainer; those that a subclass does not need do nothing.
    """

    #: Weights are the same on all workers.
    replicates: ClassVar[bool] = True
    #: The engine, if this is its exchange.
    engine: Engine | None = None

    def __deepcopy__(self, memo: object) -> GradientExchange:
        return self  # it has hooks on one model: a copy of the strategy, or of the Trainer, trains nothing

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of DistributedDataParallel, with those that this exchange needs."""
        return options

    def register(self, ddp: DistributedDataParallel) -> None:
        """Registers hooks on the wrapped model. Collective."""

    def bind(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None = None) -> None:
        """Ties the exchange to what exists only after the model was wrapped: optimizers, and what scales the loss.

        Raises:
            MisconfigurationException: If the exchange does not go with an optimizer.
        """

    def cautions(self, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
        """What is known to cost accuracy with these optimizers, in sentences without an end."""
        return ()

    def begin_batch(self) -> None:
        """A training step is about to begin."""

    def begin_backward(self, epoch: int) -> None:
        """A backward pass is about to begin."""

    def end_backward(self, synchronised: bool) -> None:
        """A backward pass has ended; ``synchronised``: not one inside of ``no_sync``.

        Raises:
            RuntimeError: If gradients were left unsynchronised, with the names of the parameters.
        """

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any], compiled: bool
    ) -> Any:
        """Makes a step of an optimizer, with a closure in the place of the given one.

        With automatic optimization the closure is the forward and backward pass, of a model that may be ``compiled``.
        """
        return step(closure)

    def settle(self) -> None:
        """Finishes the last step, where a part of it is left for the next forward pass."""

    def settle_optimizers(self) -> None:
        """Makes the optimizers' state one that a step without this exchange can use, as for a checkpoint."""

    def pause(self) -> None:
        """Validation begins, or training ends: the model gets the weights that are validated and saved."""

    def resume(self) -> None:
        """Validation has ended, training continues."""

    def finish(self) -> None:
        """Training has ended."""

    def weights(self) -> dict[str, Tensor]:
        """Entries of the model's state that are saved in the place of its own."""
        return {}

    def abandon(self) -> None:
        """An error has ended training: nothing may wait for another rank."""

    def close(self) -> None:
        """Removes every hook."""
