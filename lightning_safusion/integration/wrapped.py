"""Models whose gradients are exchanged outside of Trainer, in DDP; sharded ones are in ``sharded.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.fusion.hook import Relay
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.parameters import trained

DenseRules = tuple[list[str], int, int]

TAKEN = "the model is attached already: call close() of what attach has returned first"


class Wrapped(Protocol):
    """A model whose gradients are averaged over a group of workers."""

    module: nn.Module  #: that is called in a forward pass
    inner: nn.Module  #: with the names of the parameters
    group: dist.ProcessGroup  #: of its replicas
    options: dict[str, str]  #: that must be the same on all of them
    find_unused: bool
    static: bool
    dense: str  #: what averages gradients where nothing is exchanged sparse
    place: tuple[int, int]  #: number of this worker among those that have pieces of a replica, and how many these are

    @property
    def synchronises(self) -> bool:
        """Whether a backward pass exchanges gradients now."""

    def parameters(self) -> Iterable[Tensor]:
        """What optimizers step."""

    def specs(self, optimizers: Sequence[Optimizer], rules: DenseRules) -> tuple[TensorSpec, ...]:
        """The gradients that are exchanged, as they arrive."""

    def install(self, exchange: EngineExchange, optimizers: Sequence[Optimizer]) -> None:
        """Hands gradients to an exchange from now on."""

    def leave(self) -> None:
        """Gradients are averaged dense from now on."""

    def release(self) -> None:
        """Somebody else may take the model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside exchange nothing; the next one outside exchanges the sum."""

    def refuse_join(self) -> None:
        """Raises a RuntimeError if workers may have different numbers of batches."""

    def gather(self, value: object) -> list[Any]:
        """What the workers of this replica give. Collective."""

    def whole(self, name: str, local: Tensor) -> Tensor:
        """What this worker has of a tensor, by the parameter's name, as a part of the whole one."""

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What this worker has of a tensor: the reverse of :meth:`whole`, of one that is here in full."""


class InDDP:
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
        self.place = 0, 1
        self.find_unused, self.static = bool(model.find_unused_parameters), bool(model.static_graph)
        self.options = {"find_unused_parameters": str(self.find_unused), "static_graph": str(self.static)}
        self._relay = _relay_of(model)
        self._relay.taken = True

    @property
    def synchronises(self) -> bool:
        """See :class:`Wrapped`, as all below."""
        return bool(self._ddp.require_backward_grad_sync)

    def parameters(self) -> Iterable[Tensor]:
        return self.inner.parameters()

    def specs(self, optimizers: Sequence[Optimizer], rules: DenseRules) -> tuple[TensorSpec, ...]:
        return specs_from_parameters(trained(self.inner, optimizers), *rules)

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

    def gather(self, value: object) -> list[Any]:
        return [value]

    def whole(self, name: str, local: Tensor) -> Tensor:
        return local

    def piece(self, name: str, whole: Tensor) -> Tensor:
        return whole


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
