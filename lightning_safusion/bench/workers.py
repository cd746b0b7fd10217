"""What each process of a benchmark does: it trains one system, some steps at a time, when it is told to.

All of them run Lightning's trainer with the strategy in question, from the beginning of the benchmark to its end, so
that systems can take turns with everything they have learnt about their costs.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_safusion.baselines.hooks import HookExchange
from lightning_safusion.bench.links import sent_bytes
from lightning_safusion.bench.rows import Row, parse_row
from lightning_safusion.bench.workload import Classifier, Paced, Workload
from lightning_safusion.simulate.trace import Trace
from lightning_safusion.strategy import SAFusionStrategy

#: The row without any exchange: what a step takes if the network costs nothing.
FLOOR = "no-exchange"
#: The floor with workers that wait for each other: what a step takes at least if gradients are exchanged at all.
IN_STEP = "barrier"


#: Of the trainer of each worker: it is a node of one CPU device, and leaves nothing behind.
WORKER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "accelerator": "cpu",
        "devices": 1,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
)


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
        torch.distributed.all_reduce(torch.zeros(1))


#: Rows that are no systems: what others are compared with.
REFERENCE_STRATEGIES = MappingProxyType({FLOOR: NoExchange, IN_STEP: InStep})


@dataclass(frozen=True)
class Task:
    """What the workers train, the same for all systems: a network of :class:`Classifier`, or a trace to sleep through;
    ``density`` is that of sparse systems whose row says nothing else."""

    model: str = "conv"
    size: str = "base"
    batch_size: int = 16
    density: float = 0.01
    trace: Trace | None = None
    seed: int = 0

    def row(self, system: str) -> Row:
        """The row that a text names."""
        return parse_row(system)

    def module(self, system: str = "ddp") -> Workload:
        """The module that every worker trains for a row."""
        torch.manual_seed(self.seed)
        return Classifier(self.model, self.size, self.batch_size) if self.trace is None else Paced(self.trace)

    def strategy(self, system: str) -> DDPStrategy:
        """The strategy of a row."""
        if system in REFERENCE_STRATEGIES:
            return REFERENCE_STRATEGIES[system](process_group_backend="gloo")
        return self.row(system).strategy(self.density)


@dataclass(frozen=True)
class Block:
    """Steps that one worker has trained in one go.

    Args:
        steps: Seconds of each step: forward, backward, exchange and optimizer, without loading.
        figures: Of the last one, from the strategy's report; empty where DDP exchanges.
        wire_bytes: That its device has sent per step, headers included; None on the loopback.
        peak_bytes: Largest resident set of its process so far, that of torch itself included.
        plan: Buffers of the plan in use, as ``Plan.to_list`` has them; None where DDP exchanges.
    """

    steps: tuple[float, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    wire_bytes: float | None = None
    peak_bytes: int = 0
    plan: list[list[Any]] | None = None


class Turns(Callback):
    """Lets a trainer run only as many steps as it is told through a pipe; the pipe takes None before the first, and a
    :class:`Block` for each number."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._left = 0
        self._ready = False
        self._steps: list[float] = []
        self._sent: int | None = None
        self._begin = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning gives a node with one device all cores
        torch.set_num_threads(1)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._left == 0:
            if not self._ready:
                self._ready = True
                self._pipe.send(None)
            self._left = int(self._pipe.recv())
            self._steps = []
            trainer.strategy.barrier()
            self._sent = sent_bytes()
        self._begin = perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps.append(perf_counter() - self._begin)
        self._left -= 1
        if self._left > 0:
            return
        wire = sent_bytes()
        per_step = (wire - self._sent) / len(self._steps) if wire is not None and self._sent is not None else None
        figures, plan = {}, None
        if isinstance(trainer.strategy, SAFusionStrategy):
            figures, plan = trainer.strategy.report(), trainer.strategy.plan
        groups = plan.to_list() if plan is not None else None
        self._pipe.send(Block(tuple(self._steps), figures, per_step, peak_bytes(), groups))


def peak_bytes() -> int:
    """Largest resident set of this process so far; ``ru_maxrss`` is in KiB on Linux, in bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def train(task: Task, system: str, workers: int, steps: int, callbacks: Sequence[Callback], pipe: Connection) -> None:
    """Trains one system for ``steps`` steps in turns, as one of the workers; says when it is ready to begin."""
    module = task.module(system)
    torch.manual_seed(task.seed + 1 + int(os.environ["NODE_RANK"]))
    strategy, turns = task.strategy(system), [Turns(pipe), *callbacks]
    trainer = Trainer(
        num_nodes=workers, strategy=strategy, callbacks=turns, max_steps=steps, max_epochs=1, **WORKER_OPTIONS
    )
    batches: Any = [module.batch()] * steps
    trainer.fit(module, DataLoader(batches, batch_size=None))
