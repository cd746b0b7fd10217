"""Elastic averaging: the centre in numbers, in threads of one process."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.baselines.easgd import ElasticExchange
from tests.comm.exchanges import in_threads


class Wrapped:
    """Stands for DDP: the hook that keeps a worker's own gradients has nothing to do here."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Registers nothing."""


def test_the_centre_follows_the_mean_of_the_workers() -> None:
    def train(transport: LocalTransport) -> list[Tensor]:
        """The weight after every step; validated and saved weights, and the weight after both."""
        module = LightningModule()
        module.param = param = nn.Parameter(torch.zeros(4))
        exchange = ElasticExchange(transport, None)
        exchange.register(Wrapped(module))
        optimizer = torch.optim.SGD([param], lr=1.0)
        seen = []
        for step in range(5):
            param.grad = torch.full((4,), float(transport.rank + step))
            exchange.step(optimizer, lambda: None, lambda _: optimizer.step(), False)
            seen.append(param[0].detach().clone())
        seen.append(exchange.weights()["param"][0])
        exchange.pause()
        seen.append(param[0].detach().clone())
        exchange.resume()
        seen.append(param[0].detach().clone())
        exchange.finish()
        seen.append(param[0].detach().clone())
        # as after a search for the learning rate: the next training has a centre of its own
        param.grad = torch.full((4,), float(transport.rank))
        exchange.step(optimizer, lambda: None, lambda _: optimizer.step(), False)
        return [*seen, exchange.weights()["param"][0]]

    results = [torch.stack(each) for each in zip(*in_threads(local_transports(3), train), strict=True)]
    weights, centre = torch.zeros(3), torch.tensor(0.0)
    for step in range(5):
        apart = weights - centre
        weights, centre = weights - torch.arange(3) - step - 0.3 * apart, centre + 0.3 * apart.sum()
        torch.testing.assert_close(results[step], weights)
    for validated in results[5:7]:
        torch.testing.assert_close(validated, centre.expand(3))
    torch.testing.assert_close(results[7], weights)
    for ended in results[8:]:
        torch.testing.assert_close(ended, centre.expand(3))
    assert len(weights.unique()) == 3
