"""The training of ``examples/slurm/train.py`` in a worker that torchrun starts, and may have to start anew."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from examples.slurm.train import Classifier, newest_checkpoint, parse
from lab.attack.job import digest
from lab.attack.workers import hit_at, mark_hit
from lightning_safusion import SAFusionStrategy

#: Where a worker may die: hooks of a callback, in the order of a step.
MOMENTS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_save_checkpoint",
)


class Dies(Callback):
    """Kills this process once, or the launcher as well, as if the machine were lost.

    Args:
        step: After so many steps.
        moment: One of :data:`MOMENTS`.
        machine: The launcher dies as well.
        folder: Of the job.
    """

    def __init__(self, step: int, moment: str, machine: bool, folder: Path) -> None:
        self.step, self.machine, self.folder = step, machine, folder
        setattr(self, moment, self._die)

    def _die(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step < self.step or hit_at(self.folder) is not None:
            return
        print(f"rank {trainer.global_rank} dies at step {trainer.global_step}", flush=True)
        mark_hit(self.folder)
        if self.machine:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def train(options: Sequence[str], stock: bool, dies: Mapping[str, Any]) -> None:
    """Trains, or continues.

    Args:
        options: Of the example.
        stock: With Lightning's DDPStrategy.
        dies: Local rank, and arguments of :class:`Dies`; empty: nobody dies.
    """
    args = parse(options)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / f"{os.getpid()}.process").touch()
    callbacks: list[Callback] = [ModelCheckpoint(args.folder, "{step}", every_n_train_steps=args.save_every)]
    if dies and dies["local_rank"] == int(os.environ["LOCAL_RANK"]):
        callbacks.append(Dies(dies["step"], dies["moment"], dies["machine"], args.folder))
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=per_machine,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_machine,
        strategy=DDPStrategy() if stock else SAFusionStrategy(density=args.density, collective=args.collective),
        max_steps=args.steps,
        deterministic=args.deterministic,
        default_root_dir=args.folder,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, ckpt_path=newest_checkpoint(args.folder))
    print(f"rank {trainer.global_rank} of {trainer.world_size} ends with {digest(module)}", flush=True)


def work(*args: Any) -> None:
    """:func:`train` in a process that torchrun's agent has forked, which ends as an interpreter does."""
    atexit._clear()  # what the parent does when it exits
    try:
        train(*args)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as in workers.py
        atexit._run_exitfuncs()
