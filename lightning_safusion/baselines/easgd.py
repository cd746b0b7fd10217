"""Sync EASGD: workers that train on their own, held together by a centre (You, Buluç, Demmel, SC 2017, section 5)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_safusion.comm.transport.interface import Transport, Work


class ElasticAverage:
    """Pulls every worker's weights towards a centre, and the centre towards all workers, once per step.

    With the weights ``w`` from before the step: ``w -= a (w - c)`` beside the gradient's own update, and
    ``c += a sum(w - c)``. All weights travel as one packed message, an all-reduce that begins before the forward pass
    and is waited for after the backward pass. Replicas are *not* equal; the centre is, and is the result of training.

    Args:
        transport: Communicator.
        share: ``a n``, how far the centre moves towards the mean of ``n`` workers in a step, in (0, 1].

    Raises:
        ValueError: If ``share`` is outside (0, 1].
    """

    def __init__(self, transport: Transport, share: float = 0.9) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share}")
        self._transport = transport
        self._pull = share / transport.world_size
        self._centres: dict[int, Tensor] = {}  # by parameter, float32
        self._open: tuple[list[Tensor], Tensor, Tensor, Work] | None = None

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        """Launches the exchange of the weights that an optimizer is about to change."""
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not params:
            return
        for param in params:
            # all workers begin with the same weights
            self._centres.setdefault(id(param), _real(param).float().clone())
        apart = torch.cat([(_real(p).float() - self._centres[id(p)]).view(-1) for p in params])
        total = apart.clone()
        self._open = (params, apart, total, self._transport.all_reduce(total))

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for it, and moves weights and centre."""
        if self._open is None:
            return
        (params, apart, total, work), self._open = self._open, None
        work.wait()
        start = 0
        for param in params:
            centre = self._centres[id(param)]
            piece = slice(start, start + centre.numel())
            weights = _real(param)
            weights.sub_((self._pull * apart[piece]).view_as(weights).to(weights.dtype))
            centre.add_(total[piece].view_as(centre), alpha=self._pull)
            start += centre.numel()

    @torch.no_grad()
    def swap(self, params: Iterable[Tensor]) -> None:
        """Exchanges weights and centre, for validation and at the end; a second call exchanges them back."""
        for param in params:
            centre = self._centres.get(id(param))
            if centre is not None:
                own = _real(param).float().clone()
                _real(param).copy_(centre)
                centre.copy_(own)

    def centres(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of the centre by parameter name, as the parameters are."""
        known = [(name, param, self._centres[id(param)]) for name, param in named if id(param) in self._centres]
        return {name: _like(centre, param) for name, param, centre in known}


def _real(tensor: Tensor) -> Tensor:
    """The tensor without its history; a complex one as [..., 2]."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(centre: Tensor, param: Tensor) -> Tensor:
    return torch.view_as_complex(centre.clone()) if param.is_complex() else centre.to(param.dtype, copy=True)
