"""The exchanges of systems that are DDP with another communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.baselines.dear import Dear
from lightning_safusion.baselines.easgd import ElasticAverage
from lightning_safusion.baselines.hooks import DDPHookName, ddp_hook_options, register_ddp_hook
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.integration.exchange import GradientExchange


class HookExchange(GradientExchange):
    """One of torch's hooks, or none.

    Args:
        name: Of the hook.
        group: The process group that the user has given DDP.
    """

    def __init__(self, name: DDPHookName, group: dist.ProcessGroup | None) -> None:
        self._name = name
        self._group = group

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        wanted = ddp_hook_options(self._name, self._group)
        # LightningCLI passes every option with its default
        return options | {name: value for name, value in wanted.items() if options.get(name) in (None, False)}

    def register(self, ddp: DistributedDataParallel) -> None:
        register_ddp_hook(ddp, self._name, self._group)


class ElasticExchange(HookExchange):
    """EASGD: workers train on weights of their own; the centre is validated and saved.

    Args:
        transport: Communicator.
        group: The process group that the user has given DDP.
    """

    replicates = False

    def __init__(self, transport: Transport, group: dist.ProcessGroup | None) -> None:
        super().__init__("local", group)
        self._average: ElasticAverage | None = ElasticAverage(transport)
        self._module: nn.Module | None = None

    def register(self, ddp: DistributedDataParallel) -> None:
        super().register(ddp)
        self._module = ddp.module

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        step: Callable[[Callable[[], Any]], Any],
        module: LightningModule | None,
        compiled: bool,
    ) -> Any:
        if self._average is None:
            return step(closure)
        # with automatic optimization the closure is the forward and backward pass, which hide the exchange
        self._average.begin(optimizer)
        result = step(closure)
        self._average.finish()
        return result

    def pause(self) -> None:
        if self._average is not None and self._module is not None:
            self._average.swap(self._module.parameters())

    def resume(self) -> None:
        self.pause()

    def finish(self) -> None:
        self.pause()  # the centre stays in the place of the weights
        self._average = None

    def weights(self, module: LightningModule) -> dict[str, Tensor]:
        return {} if self._average is None else self._average.centres(module.named_parameters())

    def close(self) -> None:
        self._average = self._module = None


def hook_exchange(name: DDPHookName, transport: Transport, group: dist.ProcessGroup | None) -> GradientExchange:
    """The exchange of a system that is DDP with another hook.

    Args:
        name: Of the hook.
        transport: Communicator, for hooks of ours.
        group: The process group that the user has given DDP; None for the default one.
    """
    if name == "dear":
        return Dear(transport)
    if name == "local":
        return ElasticExchange(transport, group)
    return HookExchange(name, group)
