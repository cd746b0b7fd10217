"""What the callbacks cost: steps with them and without them, side by side in one training of two workers.

    $ python -m lab callbacks

All callbacks of the package, or those named, are taken out of the running trainer for a block of steps, put back for
the next one, and so on; a block has as many steps as each callback takes from one report to the next, so that one
report of each is in every block (by default a replica check and a probe come more rarely). What is printed is the ratio
of the mean step of a block with them to that of its neighbours without: the median over blocks, and the middle half;
and the same of processor time, which other programs on the machine disturb less. ``--null`` compares blocks without
callbacks with each other: what chance alone does. Beside it the share of the time that is spent in the hooks of the
callbacks, by a clock round them, which misses what they slow down elsewhere but hardly depends on chance. The tuner's
reviews are the planner's and happen in all blocks: their share is printed in the same way.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lab.probe import ConvergenceProbe
from lab.processes import run_workers
from lightning_safusion import SAFusionStrategy
from lightning_safusion.callbacks import (
    BufferSizeTuner,
    OverlapProfiler,
    ReplicaConsistencyCheck,
    TensorMissingRateMonitor,
)
from lightning_safusion.fusion.planning import Planner
from lightning_safusion.lookup import look_up
from lightning_safusion.tools.team import Place, make_trainer

WATCHED: dict[str, Callable[..., Callback]] = {
    "overlap": OverlapProfiler,
    "missing": TensorMissingRateMonitor,
    "replicas": ReplicaConsistencyCheck,
    "probe": ConvergenceProbe,
}


class Alternating(LightningModule):
    """A chain of layers; takes callbacks out and puts them back, and keeps the seconds of every block.

    Args:
        tensors: Parameter tensors.
        width: Layers are width x width.
        block: Steps in a block.
        null: Leave the callbacks out in all blocks.
    """

    def __init__(self, tensors: int, width: int, block: int, null: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))
        self.block = block
        self.null = null
        self.watched: list[Callback] = []
        self.seconds: list[tuple[float, float]] = []
        self._begin = (0.0, 0.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.block:
            return
        if batch_idx:
            wall, processor = (now - begin for now, begin in zip(_now(), self._begin, strict=True))
            self.seconds.append((wall / self.block, processor / self.block))
        if self._switch(batch_idx // self.block % 2 == 1 and not self.null):
            for each in self.watched:  # they have missed it
                each.on_train_batch_start(self.trainer, self, batch, batch_idx)
        self.trainer.strategy.barrier()
        self._begin = _now()

    def _switch(self, on: bool) -> bool:
        # in a hook of the module: no loop over the trainer's callbacks is under way
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # of the trainer, set in its init
        strategy = self.trainer.strategy
        assert isinstance(strategy, SAFusionStrategy)
        self.watched = self.watched or [each for each in callbacks if type(each) in set(WATCHED.values())]
        for each in self.watched:
            if on and each not in callbacks:
                callbacks.append(each)
            if not on and each in callbacks:
                callbacks.remove(each)
                if isinstance(each, OverlapProfiler):
                    strategy.remove_observer(each._recorder)
        return on

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def time_reviews() -> list[float]:
    """Puts a clock round the planner's work between windows; returns the list to which its seconds go."""
    seconds: list[float] = []
    observe = Planner.observe

    def timed(planner: Planner, *args: Any) -> None:
        begin = time.perf_counter()
        observe(planner, *args)
        seconds.append(time.perf_counter() - begin)

    Planner.observe = timed  # type: ignore[method-assign, assignment]  # a clock round a method, in the benchmark's own processes
    return seconds


def time_hooks(callbacks: Sequence[Callback]) -> dict[str, float]:
    """Puts a clock round all hooks of the callbacks, and what they observe; returns the growing seconds of each."""
    totals = {type(each).__name__: 0.0 for each in callbacks}

    def clocked(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                totals[name] += time.perf_counter() - begin

        return timed

    for each in callbacks:
        observers = [each._recorder] if isinstance(each, OverlapProfiler) else []
        for part in (each, *observers):
            hooks = [
                name for name in dir(part) if name.startswith(("on_train_batch", "on_before", "on_after", "observe"))
            ]
            for name in hooks:
                if getattr(type(part), name) is not getattr(Callback, name, None):  # it has such a hook
                    setattr(part, name, clocked(type(each).__name__, getattr(part, name)))
    return totals


@dataclass(frozen=True)
class Measured:
    """What is measured.

    Args:
        names: Of the callbacks.
        tensors: Parameter tensors.
        width: Layers are width x width.
        batch_size: Samples of one worker.
        every: Steps from report to report, and in a block.
        pairs: Blocks with the callbacks.
        null: Leave the callbacks out everywhere.
    """

    names: Sequence[str]
    tensors: int
    width: int
    batch_size: int
    every: int
    pairs: int
    null: bool


def callbacks(
    only: Sequence[str] = tuple(WATCHED),
    tensors: int = 200,
    width: int = 128,
    batch_size: int = 64,
    every_n_steps: int = 50,
    pairs: int = 20,
    null: bool = False,
) -> None:
    """What the callbacks cost: steps with them and without them, side by side in one training of two workers.

    Args:
        only: These: "overlap", "missing", "replicas", "probe".
        tensors: Parameter tensors.
        width: Layers are width x width.
        batch_size: Samples of one worker.
        every_n_steps: Steps from report to report, and in a block.
        pairs: Blocks with the callbacks.
        null: Leave the callbacks out everywhere: what chance alone does.
    """
    for name in only:
        look_up("callback", name, WATCHED)
    measured = Measured(only, tensors, width, batch_size, every_n_steps, pairs, null)
    for line in run_workers(Place(2), partial(_work, measured)):
        print(line, flush=True)


def _work(measured: Measured, rank: int, pipe: Connection) -> None:
    """One worker; the first one sends the lines of the report."""
    steps = (2 * measured.pairs + 3) * measured.every + 1  # the first two blocks settle
    made: list[Callback] = []
    for name in measured.names:
        options: dict[str, Any] = {"table": False} if name == "overlap" else {"worst": 0} if name == "missing" else {}
        made.append(WATCHED[name](every_n_steps=measured.every, **options))
    model = Alternating(measured.tensors, measured.width, measured.every, measured.null)
    data = TensorDataset(torch.randn(measured.batch_size, measured.width).repeat(steps, 1))
    strategy = SAFusionStrategy(collective="allgather", density=0.05, fusion="aligned", process_group_backend="gloo")
    callbacks = [*made, BufferSizeTuner()]
    trainer = make_trainer(2, strategy, callbacks, max_steps=steps, default_root_dir=tempfile.mkdtemp())
    reviews, hooks = time_reviews(), time_hooks(made)
    begin = time.perf_counter()
    trainer.fit(model, DataLoader(data, batch_size=measured.batch_size))
    if rank == 0:
        for text in lines(model.seconds[2:], measured):
            pipe.send(text)
        watched = measured.every * sum(wall for wall, _ in model.seconds[1::2])
        for name, total in hooks.items():
            pipe.send(f"  in {name}: {100 * total / watched:.2f} % of the time")
        pipe.send(f"  the tuner's reviews: {100 * sum(reviews) / (time.perf_counter() - begin):.2f} % of the time")


def lines(seconds: Sequence[tuple[float, float]], measured: Measured) -> Iterator[str]:
    """The ratios of each block with the callbacks to the mean of its neighbours, which are without."""
    what = "nothing" if measured.null else ", ".join(measured.names)
    step = statistics.median(wall for wall, _ in seconds[::2])
    yield f"{what}, {measured.tensors} tensors, {step * 1e3:.1f} ms per step, {len(seconds) // 2} pairs of blocks"
    for name, column in zip(("time", "processor time"), zip(*seconds, strict=True), strict=True):
        ratios = [column[i] / statistics.fmean((column[i - 1], column[i + 1])) for i in range(1, len(column) - 1, 2)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        yield f"  {name}: ratio {middle:.4f}, middle half {low:.4f} to {high:.4f}"
