"""Models whose gradients are exchanged outside of Trainer, in DDP; sharded ones are in ``sharded.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.fusion.hook import Relay
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.integration.engine_exchange import COMPILE_BUCKET_BYTES, EngineExchange
from lightning_safusion.integration.parameters import trained

DenseRules = tuple[list[str], int, int]

TAKEN = "the model is attached already: call close() of what attach has returned first"


class Wrapped(ABC):
    """A model whose gradients are averaged over a group of workers."""

    module: nn.Module  #: that is called in a forward pass
    inner: nn.Module  #: with the names of the parameters
    group: dist.ProcessGroup  #: of its replicas
    options: dict[str, str]  #: that must be the same on all of them
    dense: str  #: what averages gradients where nothing is exchanged sparse
    find_unused: bool = False
    static: bool = False
    #: Number of this worker among those that have pieces of a replica, and how many these are.
    place: tuple[int, int] = 0, 1

    @property
    @abstractmethod
    def synchronises(self) -> bool:
        """Whether a backward pass exchanges gradients now."""

    @abstractmethod
    def install(self, exchange: EngineExchange, optimizers: Sequence[Optimizer]) -> None:
        """Hands gradients to an exchange from now on."""

    @abstractmethod
    def leave(self) -> None:
        """Gradients are averaged dense from now on."""

    @abstractmethod
    def release(self) -> None:
        """Somebody else may take the model."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside exchange nothing; the next one outside exchanges the sum."""

    def parameters(self) -> Iterable[Tensor]:
        """What optimizers step."""
        return self.inner.parameters()

    def specs(self, optimizers: Sequence[Optimizer], rules: DenseRules) -> tuple[TensorSpec, ...]:
        """The gradients that are exchanged, as they arrive."""
        return specs_from_parameters(trained(self.inner, optimizers), *rules)

    def refuse_part(self) -> None:  # noqa: B027  # DDP wraps whole models
        """Raises a ValueError if a forward pass shows that the model is a part of another one."""

    def refuse_join(self) -> None:  # noqa: B027  # FSDP2 has none
        """Raises a RuntimeError if workers may have different numbers of batches."""

    def gather(self, value: object) -> list[Any]:
        """What the workers of this replica give. Collective."""
        return [value]

    def whole(self, name: str, local: Tensor) -> Tensor:
        """What this worker has of a tensor, by the parameter's name, as a part of the whole one."""
        return local

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What this worker has of a tensor: the reverse of :meth:`whole`, of one that is here in full."""
        return whole


class InDDP(Wrapped):
    """A model in DistributedDataParallel.

    Args:
        model: Without a communication hook.

    Raises:
        RuntimeError: If it has one, or is taken.
    """

    dense = "plain DDP"

    def __init__(self, model: DistributedDataParallel) -> None:
        self.module: nn.Module = model
        self.inner: nn.Module = model.module
        self.group: dist.ProcessGroup = model.process_group
        self._ddp = model
        model.bucket_bytes_cap = COMPILE_BUCKET_BYTES  # Dynamo refuses small buckets, also where DDP averages
        self.find_unused, self.static = bool(model.find_unused_parameters), bool(model.static_graph)
        self.options = {"find_unused_parameters": str(self.find_unused), "static_graph": str(self.static)}
        self._relay = _relay_of(model)
        self._relay.taken = True

    @property
    def synchronises(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    def install(self, exchange: EngineExchange, optimizers: Sequence[Optimizer]) -> None:
        exchange.register(self._ddp, self._relay)

    def leave(self) -> None:
        self._relay.target = None

    def release(self) -> None:
        self._relay.taken = False

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def refuse_join(self) -> None:
        if self._ddp._join_config.enable:
            raise RuntimeError(
                "DistributedDataParallel.join() answers for workers that have ended outside of a backward pass, where "
                "nothing can be exchanged sparse: give all workers as many batches, or call close() before join()"
            )


def _relay_of(model: DistributedDataParallel) -> Relay:
    """The hook of a model, which is there for ever once it was registered."""
    relay = _relays.get(model)
    if relay is None:
        relay = Relay(model.process_group)
        model.register_comm_hook(None, relay.run)
        _relays[model] = relay
    if relay.taken:
        raise RuntimeError(TAKEN)
    return relay


_relays: WeakKeyDictionary[DistributedDataParallel, Relay] = WeakKeyDictionary()
