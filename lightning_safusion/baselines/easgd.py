"""Sync EASGD: workers that train on their own, held together by a centre (You, Buluç, Demmel, SC 2017, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.baselines.hooks import HookExchange
from lightning_safusion.comm.transport.interface import Transport

# How far the centre moves towards the mean of the workers in a step: "a n" below.
_SHARE = 0.9


class ElasticExchange(HookExchange):
    """Pulls every worker's weights towards a centre, and the centre towards all workers, once per step.

    With the weights ``w`` from before the step: ``w -= a (w - c)`` beside the gradient's own update, and
    ``c += a sum(w - c)``. All weights are one packed message, an all-reduce that begins before the forward pass and is
    waited for after the backward pass. Replicas are *not* equal; the centre is, and it is validated and saved.

    Args:
        transport: Communicator.
        group: The process group that the user has given DDP; None for the default one.
    """

    replicates = False

    def __init__(self, transport: Transport, group: dist.ProcessGroup | None) -> None:
        super().__init__("local", group)
        self._transport = transport
        self._pull = _SHARE / transport.world_size
        self._centres: dict[int, Tensor] = {}  # float32, by id of the parameter
        self._module: nn.Module | None = None

    def register(self, ddp: DistributedDataParallel) -> None:
        super().register(ddp)
        self._module = ddp.module

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any], compiled: bool
    ) -> Any:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not params:
            return step(closure)
        for param in params:
            if id(param) not in self._centres:  # all workers begin with the same weights
                self._centres[id(param)] = _real(param).float().clone()
        apart = torch.cat([(_real(p).float() - self._centres[id(p)]).view(-1) for p in params])
        total = apart.clone()
        work = self._transport.all_reduce(total)
        # with automatic optimization the closure is the forward and backward pass, which hide the exchange
        result = step(closure)
        work.wait()
        start = 0
        for param in params:
            centre, weights = self._centres[id(param)], _real(param)
            piece = slice(start, start + centre.numel())
            weights.sub_((self._pull * apart[piece]).view_as(weights).to(weights.dtype))
            centre.add_(total[piece].view_as(centre), alpha=self._pull)
            start += centre.numel()
        return result

    def pause(self) -> None:
        """Exchanges weights and centre; a second call exchanges them back."""
        for param in self._module.parameters() if self._module is not None else ():
            centre = self._centres.get(id(param))
            if centre is not None:
                own = _real(param).float().clone()
                _real(param).copy_(centre)
                centre.copy_(own)

    def resume(self) -> None:
        self.pause()

    def finish(self) -> None:
        self.pause()  # the centre stays in the place of the weights
        self._centres.clear()

    def weights(self) -> dict[str, Tensor]:
        named = self._module.named_parameters() if self._module is not None else ()
        return {name: _like(self._centres[id(p)], p) for name, p in named if id(p) in self._centres}

    def close(self) -> None:
        self._centres.clear()
        self._module = None


def _real(tensor: Tensor) -> Tensor:
    """The tensor without its history; a complex one as [..., 2]."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(centre: Tensor, param: Tensor) -> Tensor:
    return torch.view_as_complex(centre.clone()) if param.is_complex() else centre.to(param.dtype, copy=True)
