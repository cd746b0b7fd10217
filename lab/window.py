"""What one steady window of the default passes through: modules, functions and Python calls.

    $ python -m lab window --optimizer adamw --verbose

Two workers on the CPU train a chain of layers; in one step, from the loss to the final gradients, every call of a
Python function of this package is counted on the first of them.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lab.markdown import markdown
from lab.processes import run_workers
from lightning_safusion import Aligned, SAFusionStrategy
from lightning_safusion.tools.team import Place, make_trainer

_PACKAGE = "lightning_safusion" + os.sep
Calls = Counter[tuple[str, str]]


class Chain(LightningModule):
    """Layers of one width.

    Args:
        layers: How many.
        width: Their width.
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    def __init__(self, layers: int, width: int, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.01)
        return torch.optim.AdamW(self.parameters(), 0.001)


class CallCounter(Callback):
    """Counts the calls of this package's Python functions in the backward pass of one step.

    Args:
        step: The step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls: Calls = Counter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if trainer.global_step == self.step:
            sys.setprofile(self._note)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and _PACKAGE in code.co_filename:
            self.calls[code.co_filename.split(_PACKAGE)[-1], getattr(code, "co_qualname", code.co_name)] += 1


def _work(layers: int, buffers: int, step: int, optimizer: str, rank: int, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    counter = CallCounter(step)
    fusion = Aligned(2 * layers // buffers)
    strategy = SAFusionStrategy(fusion=fusion, collective="allgather", process_group_backend="gloo")
    trainer = make_trainer(2, strategy, [counter], max_steps=step + 2)
    data = TensorDataset(torch.randn(32 * (step + 2), 256, generator=torch.Generator().manual_seed(1)))
    trainer.fit(Chain(layers, 256, optimizer), DataLoader(data, 16, sampler=DistributedSampler(data, 2, rank)))
    if rank == 0:
        pipe.send(counter.calls)


def steady_window(optimizer: str, layers: int = 3, buffers: int = 3, step: int = 200) -> Calls:
    """Calls by module and function, in one window after the first steps of the density schedule."""
    calls: Calls
    (calls,) = run_workers(Place(2), partial(_work, layers, buffers, step, optimizer))
    return calls


def window(optimizer: str = "sgd", layers: int = 3, buffers: int = 3, step: int = 200, verbose: bool = False) -> None:
    """Counts what one steady window of the default passes through.

    Args:
        optimizer: ``"sgd"`` or ``"adamw"``.
        layers: Layers of the model, two tensors each.
        buffers: Buffers that these share.
        step: Step that is counted.
        verbose: Also show every function.
    """
    calls = steady_window(optimizer, layers, buffers, step)
    modules: Counter[str] = Counter()
    for (module, _), count in calls.items():
        modules[module] += count
    rows = [(module, sum(name == module for name, _ in calls), count) for module, count in modules.most_common()]
    print(markdown(("module", "functions", "calls"), rows))
    if verbose:
        print(markdown(("function", "calls"), [(" ".join(key), count) for key, count in calls.most_common()]))
    total = sum(modules.values())
    print(
        f"{2 * layers} tensors in {buffers} buffers, step {step}: {len(modules)} modules, {len(calls)} functions, "
        f"{total} calls, {total / buffers:.0f} for each buffer"
    )
