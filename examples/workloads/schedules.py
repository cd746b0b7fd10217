"""Learning-rate schedules of the papers' scripts, as factors of the base rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_then_drops(
    step: int, steps_per_epoch: float, workers: int, warmup_epochs: float, milestones: Sequence[float], gamma: float
) -> float:
    """Linear from ``1 / workers`` to 1 (Goyal et al., 2017), then times ``gamma`` at each milestone.

    Args:
        step: Optimizer steps done.
        steps_per_epoch: Optimizer steps in an epoch.
        workers: Number of workers; the base rate is that of one worker times this.
        warmup_epochs: Length of the warm-up.
        milestones: Epochs at which the rate drops.
        gamma: Factor of each drop.

    Returns:
        The factor of the base rate for the next step.
    """
    epoch = step / steps_per_epoch
    if epoch < warmup_epochs:
        return 1 / workers + (1 - 1 / workers) * epoch / warmup_epochs
    return gamma ** sum(epoch >= milestone for milestone in milestones)


def warmup_then_linear(step: int, steps: int, warmup_steps: float) -> float:
    """Linear from 0 to 1 over the warm-up, then linear to 0 at the last step (Devlin et al., 2019).

    Args:
        step: Optimizer steps done.
        steps: Optimizer steps of the whole training.
        warmup_steps: Those of the warm-up; 0 for none.

    Returns:
        The factor of the base rate for the next step.
    """
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (steps - step) / max(1.0, steps - warmup_steps))


def training_steps(module: LightningModule) -> int:
    """Optimizer steps of the whole training of this worker; each is a step of all workers.

    Raises:
        ValueError: If the trainer has no end.
    """
    steps = module.trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise ValueError("the learning rate follows the length of the training: give --trainer.max_epochs or max_steps")
    return int(steps)


def stepwise(optimizer: Optimizer, factor: Callable[[int], float]) -> OptimizerLRScheduler:
    """What ``configure_optimizers`` returns for a rate that changes at every step."""
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}
