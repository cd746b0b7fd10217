"""The job that is attacked: a small network that a real Lightning Trainer fits, validates and saves."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lab.attack.trial import TIMEOUT
from lightning_safusion import ConstantDensity, SAFusionStrategy
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion import build
from lightning_safusion.fusion.state import local_state

INPUTS, CLASSES = 32, 10
SAVES_EVERY, VALIDATES_EVERY = 3, 8


@dataclass(frozen=True)
class System:
    """A way to exchange gradients.

    Args:
        options: Of the strategy.
        workers, nodes: Of its jobs.
        hands_over: Costs are such that plain DDP takes over.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 3
    nodes: int = 1
    hands_over: bool = False


_PLAIN = {"memory": "residual", "density": 0.05}
SYSTEMS = {
    "default": System(),
    "allgather": System({"collective": "allgather", **_PLAIN}),
    "sharded": System({"collective": "sharded", **_PLAIN}),
    "hierarchical-sharded": System({"collective": "hierarchical-sharded", **_PLAIN}, workers=4, nodes=2),
    "shared quotas": System({"collective": "allgather", "quota": "shared", "select_by": "gradient", **_PLAIN}, 2),
    "decoupled": System({"collective": "allgather", "memory": "decoupled", "density": 0.05}, 2),
    "ddp": System({"system": "ddp"}, 2),
    "hand-over": System({"density": ConstantDensity(0.05)}, 2, hands_over=True),
}


class Tiny(LightningModule):
    """Two layers with a norm."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(INPUTS, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, CLASSES))
        self.optimizer, self.options = optimizer, {"lr": 1e-3, **options}

    def configure_model(self) -> None:
        """Nothing: a place to be attacked in."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Logs the loss of all workers."""
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """By name."""
        kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, self.optimizer)
        return kind(self.parameters(), **self.options)


@dataclass(frozen=True)
class Recipe:
    """One training.

    Args:
        system: By name.
        steps: Of the optimizer.
        workers: How many; None: those of the system.
        checkpoints: Folder; None: none are written.
        resumes: Path of a checkpoint.
        asynchronous: Main files are written by a thread.
        spread: Each worker is a node of its own.
        strategy, trainer, model: Further options.
    """

    system: str
    steps: int
    workers: int | None = None
    checkpoints: Path | None = None
    resumes: Path | None = None
    asynchronous: bool = False
    spread: bool = False
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Workers and nodes."""
        system = SYSTEMS[self.system]
        workers, nodes = (system.workers, system.nodes) if self.workers is None else (self.workers, 1)
        return workers, workers if self.spread else nodes

    def resumed(self) -> Recipe:
        """Two workers that go on from its newest checkpoint, past the next save."""
        path = self.newest
        step = int(torch.load(path, weights_only=False)["global_step"])
        return replace(self, workers=2, resumes=path, steps=step + SAVES_EVERY + 1, asynchronous=False, spread=False)

    @property
    def newest(self) -> Path:
        """Its checkpoint: there is one, which is replaced."""
        if self.checkpoints is None:
            raise ValueError("this training writes no checkpoints")
        return self.checkpoints / "last.ckpt"


def data(samples: int) -> DataLoader[Any]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, INPUTS, generator=generator)
    y = (x @ torch.randn(INPUTS, CLASSES, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def train(
    recipe: Recipe, callbacks: Sequence[Callback], told: dict[str, Any], model: Callable[..., Tiny] = Tiny
) -> None:
    """Trains on this worker; tells the step at which it ends, a digest of the weights, and whether it has an engine."""
    system = SYSTEMS[recipe.system]
    if system.hands_over:
        costs = {"allgather": LinearCost(1.0, 1.0), "allreduce": LinearCost(1e-6, 1e-12)}
        setattr(build, "calibrate", lambda transport, device: dict(costs))  # noqa: B010  # in a process of its own
    workers, nodes = recipe.size
    strategy = SAFusionStrategy(**{"timeout": timedelta(seconds=TIMEOUT), **system.options, **recipe.strategy})
    saves: list[Callback] = []
    if recipe.checkpoints is not None:
        options: dict[str, Any] = {"save_top_k": 1, "every_n_train_steps": SAVES_EVERY, "enable_version_counter": False}
        saves = [ModelCheckpoint(recipe.checkpoints, "last", **options), Recorder(recipe.checkpoints)]
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "devices": workers // nodes,
            "num_nodes": nodes,
            "strategy": strategy,
            "max_steps": recipe.steps,
            "callbacks": [*callbacks, *saves],
            "plugins": [AsyncCheckpointIO()] if recipe.asynchronous else [],
            "val_check_interval": VALIDATES_EVERY,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": bool(saves),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **recipe.trainer,
        }
    )
    module = model(**recipe.model)
    try:
        trainer.fit(module, data(8 * workers * 32), data(64), ckpt_path=recipe.resumes)
    finally:
        engine = strategy.figures()["plain_ddp"] is None
        told |= {"step": trainer.global_step, "digest": digest(module), "engine": engine}


def digest(module: nn.Module) -> str:
    """Of the weights."""
    made = hashlib.sha256()
    for tensor in module.state_dict().values():
        made.update(tensor.detach().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


def memory_of(trainer: Trainer) -> dict[str, dict[str, Tensor]] | None:
    """What this worker holds back, by field and parameter; None without an engine."""
    engine = trainer.strategy.engine  # type: ignore[attr-defined]  # of this package
    return None if engine is None else local_state(engine)["memory"]


class Recorder(Callback):
    """Writes what this worker holds back whenever a checkpoint is made, in a file of its own.

    Args:
        folder: For the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Writes it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)  # a full disk is for the job's own files
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, most[1]))
        torch.save(memory_of(trainer), self.folder / f"held-{trainer.global_step}-{trainer.global_rank}.pt")
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


class Compares(Callback):
    """Tells whether training begins with what the workers held back when the checkpoint was saved.

    Args:
        folder: Of the :class:`Recorder`.
        told: Takes ``"memory"``: ``"as saved"``, ``"empty"``, ``"none"`` (no engine), or what differs.
    """

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        self.folder, self.told = folder, told

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares."""
        files = sorted(self.folder.glob(f"held-{trainer.global_step}-*.pt"))
        saved = [torch.load(file, weights_only=True) for file in files]
        self.told["memory"] = compared(memory_of(trainer), saved, trainer.global_rank, trainer.world_size)


def compared(now: Any, saved: Sequence[Any], rank: int, workers: int) -> str:
    """What a worker's memory is, beside those that were saved: bitwise its own, or the mean of another number's."""
    if now is None or not saved or any(each is None for each in saved):
        return "none"
    kept, emptied = 0, 0
    for name, tensors in now.items():
        for parameter, tensor in tensors.items():
            theirs = [each[name][parameter] for each in saved if parameter in each.get(name, {})]
            own = len(saved) == workers == len(theirs)
            if theirs and (
                torch.equal(tensor, theirs[rank])
                if own
                else torch.allclose(tensor, torch.stack(theirs).mean(0), atol=1e-7)
            ):
                kept += 1
            elif not bool(tensor.any()):
                emptied += 1
            else:
                return f"{name} of {parameter} is not what was saved"
    return "as saved" if not emptied else f"{emptied} tensors empty" if kept else "empty"
