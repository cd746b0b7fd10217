"""The exchanges of systems that are DDP with another communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.baselines.dear import Dear
from lightning_safusion.baselines.easgd import ElasticAverage
from lightning_safusion.baselines.hooks import DDPHookName, ddp_hook_options, register_ddp_hook
from lightning_safusion.baselines.limits import reason_to_settle, runs_compiled
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.integration.exchange import GradientExchange
from lightning_safusion.integration.parameters import trainable


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


class DearExchange(HookExchange):
    """DeAR: a step may reach into the next forward pass.

    Args:
        transport: Communicator.
        group: The process group that the user has given DDP.
    """

    def __init__(self, transport: Transport, group: dist.ProcessGroup | None) -> None:
        super().__init__("dear", group)
        self._transport = transport
        self._static_graph = False
        self._dear: Dear | None = None
        self._runs_compiled: bool | None = None  # nobody has looked
        self._because: str | None = None  # why no step reaches into the next forward pass

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        self._static_graph = bool(options.get("static_graph"))
        return super().ddp_options(options)

    def register(self, ddp: DistributedDataParallel) -> None:
        params = [param for _, param in trainable(ddp.module)]
        self._dear = Dear(ddp.module, params, self._transport, self._static_graph)
        ddp.register_comm_hook(None, self._dear.run)

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        step: Callable[[Callable[[], Any]], Any],
        module: LightningModule | None,
        compiled: bool,
    ) -> Any:
        if self._dear is None or module is None or not self._may_delay(optimizer, module, compiled):
            return step(closure)
        return self._dear.step(optimizer, closure, step)

    def _may_delay(self, optimizer: Optimizer, module: LightningModule, compiled: bool) -> bool:
        """Whether the step of an optimizer may reach into the next forward pass; says once why not."""
        if self._runs_compiled is None:
            self._runs_compiled = compiled or runs_compiled(module)
        reason = reason_to_settle(module.trainer, module, optimizer, self._runs_compiled)
        if reason is not None and reason != self._because:
            rank_zero_info(f"SAFusionStrategy: gradients are averaged when a backward pass ends, because {reason}.")
        self._because = reason
        return reason is None

    def pending(self, param: Tensor) -> bool:
        """Whether the mean of a parameter's gradient has not been used yet."""
        return self._dear is not None and self._dear.pending(param)

    def settle(self) -> None:
        if self._dear is not None:
            self._dear.settle()

    def abandon(self) -> None:
        if self._dear is not None:
            self._dear.abandon()

    def close(self) -> None:
        if self._dear is not None:
            self._dear.close()


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
        return DearExchange(transport, group)
    if name == "local":
        return ElasticExchange(transport, group)
    return HookExchange(name, group)
