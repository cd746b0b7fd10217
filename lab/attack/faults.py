"""Where a worker is hit, and by what: before or after a call of a method of a class, once a step has been made."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lab.attack.job import SYSTEMS
from lab.attack.workers import mark_hit


class Injected(Exception):
    """The exception of an attack."""


def _raise() -> None:
    raise Injected("injected")


#: What happens to the worker.
ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
ENGINES = tuple(name for name in SYSTEMS if name != "ddp")


@dataclass(frozen=True)
class Spot:
    """A place in the program.

    Args:
        owner: Class, as ``MODULE:NAME``.
        method: Of it.
        systems: Whose jobs come there.
        actions: Attacks that make sense there.
        after: The attack comes when the call has returned.
        main: Only rank 0 comes there.
        begins: It is passed before the first step.
        once: It is passed only once.
        defers: A signal is heard by all ranks before the same batch there.
    """

    owner: str
    method: str
    systems: Sequence[str] = tuple(SYSTEMS)
    actions: Sequence[str] = tuple(ACTIONS)
    after: bool = False
    main: bool = False
    begins: bool = False
    once: bool = False
    defers: bool = False


_SHIPMENT = "lightning_safusion.fusion.shipment:Shipment"
_OWNERS = "lightning_safusion.comm.collectives"
_TINY = "lab.attack.job:Tiny"
_STRATEGY = "lightning_safusion.strategy:SAFusionStrategy"
_FIT = "lightning_safusion.integration.fit:Fit"
_WRITER = "lightning.fabric.plugins.io.torch_io:TorchCheckpointIO"
# an exception in the thread that writes is the future's, until the next save asks for it
_WHOLE = ("kill", "stop", "int", "term")

#: The phases of a job, by name.
SPOTS = {
    "while a buffer is filled": Spot(_SHIPMENT, "fill", ENGINES, defers=True),
    "while a buffer is packed": Spot(_SHIPMENT, "pack", ENGINES, defers=True),
    "after a buffer was launched": Spot(_SHIPMENT, "launch", ENGINES, after=True, defers=True),
    "while a buffer is decoded": Spot(_SHIPMENT, "decode", ENGINES, defers=True),
    "in the second phase of shards": Spot(
        f"{_OWNERS}.sharded:ShardedExchange", "_select_sums", ["sharded"], defers=True
    ),
    "between nodes": Spot(
        f"{_OWNERS}.hierarchical:HierarchicalShardedExchange", "_between", ["hierarchical-sharded"], defers=True
    ),
    "in a review of shared quotas": Spot(
        "lightning_safusion.fusion.quota:Shares", "review", ["shared quotas"], defers=True
    ),
    "in the hand-over to plain DDP": Spot(_FIT, "go_plain", ["hand-over"], once=True),
    "before a forward pass": Spot(_TINY, "training_step", defers=True),
    "in the step of the optimizer": Spot(_STRATEGY, "optimizer_step", defers=True),
    "between two steps": Spot("lab.attack.faults:Arms", "on_train_batch_end", defers=True),
    "in a validation": Spot(_TINY, "validation_step"),
    "before a save": Spot(_STRATEGY, "save_checkpoint", defers=True),
    "before its part is written": Spot(
        "lightning_safusion.integration.checkpoint.parts", "write", ENGINES, defers=True
    ),
    "after its part was written": Spot(
        "lightning_safusion.integration.checkpoint.parts", "write", ENGINES, after=True, defers=True
    ),
    "before the main file is written": Spot(_WRITER, "save_checkpoint", actions=_WHOLE, main=True, defers=True),
    "while the main file is written": Spot(
        "fsspec.implementations.local:LocalFileOpener", "commit", actions=_WHOLE, main=True, defers=True
    ),
    "after the main file was written": Spot(
        _WRITER, "save_checkpoint", actions=_WHOLE, after=True, main=True, defers=True
    ),
    "before set-up": Spot(_TINY, "configure_model", begins=True, once=True),
    "before the optimizers are made": Spot(_TINY, "configure_optimizers", begins=True, once=True),
    "before the model is wrapped": Spot(_FIT, "wrap", begins=True, once=True),
    "before the optimizers are compared": Spot(_FIT, "bind", begins=True, once=True),
}


@dataclass(frozen=True)
class Fault:
    """An attack on a worker.

    Args:
        action: Of :data:`ACTIONS`.
        spot: Of :data:`SPOTS`.
        rank: Whom it hits.
        step: It waits for so many steps.
        call: It hits the call of this number after that, from 0.
        folder: Of the job.
    """

    action: str
    spot: str
    rank: int
    step: int
    call: int
    folder: Path

    @classmethod
    def of(cls, drawn: Mapping[str, Any], folder: Path) -> Fault:
        """The one that was drawn."""
        return cls(drawn["action"], drawn["spot"], drawn["rank"], drawn["step"], drawn["call"], folder)

    def install(self) -> Arms:
        """Sets it up in the present process."""
        spot, arms = SPOTS[self.spot], Arms(0 if SPOTS[self.spot].begins else self.step)
        module, _, name = spot.owner.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, name) if name else owner
        own, calls = getattr(owner, spot.method), 0

        def hit() -> None:
            nonlocal calls
            calls += 1
            if calls == self.call + 1:
                mark_hit(self.folder)
                ACTIONS[self.action]()

        def hitting(*args: Any, **kwargs: Any) -> Any:
            due = arms.armed
            if due and not spot.after:
                hit()
            returned = own(*args, **kwargs)
            if due and spot.after:
                hit()
            return returned

        setattr(owner, spot.method, hitting)
        return arms


class Arms(Callback):
    """Notes that a step has been made, from which on the worker is hit.

    Args:
        step: Which; 0: at once.
    """

    def __init__(self, step: int) -> None:
        self.step, self.armed = step, step == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Arms."""
        self.armed = self.armed or trainer.global_step >= self.step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A spot between two steps."""
