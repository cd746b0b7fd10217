"""Rows that are no systems: what others are compared with."""

from __future__ import annotations

from types import MappingProxyType

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_safusion.baselines.hooks import HookExchange

#: The row without any exchange: what a step takes if the network costs nothing.
FLOOR = "no-exchange"
#: The floor with workers that wait for each other: what a step takes at least if gradients are exchanged at all.
IN_STEP = "barrier"


class NoExchange(DDPStrategy):
    """DDP whose workers keep their own gradients."""

    @override
    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            HookExchange("local", None).register(self.model)


class InStep(NoExchange):
    """Workers that keep their own gradients, and exchange a single number at the end of every backward pass."""

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        torch.distributed.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.root_device))


#: Their strategies.
REFERENCE_STRATEGIES = MappingProxyType({FLOOR: NoExchange, IN_STEP: InStep})
