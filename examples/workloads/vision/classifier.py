"""Training of an image network, with the optimizer and schedule of the papers' scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from examples.workloads.schedules import stepwise, training_steps, warmup_then_drops, warmup_then_linear


class ImageClassifier(LightningModule):
    """Cross entropy, top-1 and top-5 accuracy, SGD with momentum and a rate that drops at milestones.

    Args:
        network: Turns pixels (float32 [batch, 3, height, width]) into scores [batch, classes].
        classes: Number of classes.
        mean: Mean of each colour over the data set, of values in [0, 1].
        std: Standard deviation of each colour.
        lr: Learning rate of SGD for one worker; it is multiplied by the number of workers.
        momentum: Of SGD.
        weight_decay: L2 penalty.
        warmup_epochs: The rate rises linearly from ``lr`` to its full value.
        milestones: Epochs at which it drops to a tenth.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        lr: float = 0.0125,
        momentum: float = 0.9,
        weight_decay: float = 5e-5,
        warmup_epochs: float = 5,
        milestones: Sequence[float] = (30, 60),
    ) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.milestones = tuple(milestones)
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        top: dict[str, Metric | MetricCollection] = {
            f"val_top{k}": MulticlassAccuracy(classes, top_k=k, average="micro") for k in (1, 5)
        }
        self.accuracy = MetricCollection(top, compute_groups=False)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Scores [batch, classes] of images (uint8 [batch, 3, height, width])."""
        return self.network((images.to(self.mean.dtype) / 255 - self.mean) / self.std)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self(images), labels)
        self.log_dict(self.accuracy, prog_bar=True, on_step=False, on_epoch=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        workers = self.trainer.world_size
        optimizer = torch.optim.SGD(
            self.parameters(), self.lr * workers, momentum=self.momentum, weight_decay=self.weight_decay
        )
        factor = partial(
            warmup_then_drops,
            steps_per_epoch=training_steps(self) / self._epochs(),
            workers=workers,
            warmup_epochs=self.warmup_epochs,
            milestones=self.milestones,
            gamma=0.1,
        )
        return stepwise(optimizer, factor)

    def _epochs(self) -> int:
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 1 or self.trainer.max_steps != -1:
            raise ValueError("milestones are epochs: give --trainer.max_epochs, and no max_steps")
        return epochs


class TransformerClassifier(ImageClassifier):
    """As :class:`ImageClassifier`, with AdamW and a rate that falls linearly to zero; it is not multiplied.

    Args:
        network: Turns pixels (float32 [batch, 3, height, width]) into scores [batch, classes].
        classes: Number of classes.
        mean: Mean of each colour over the data set, of values in [0, 1].
        std: Standard deviation of each colour.
        lr: Learning rate of AdamW.
        weight_decay: Of AdamW.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        lr: float = 5e-5,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(network, classes, mean, std, lr, weight_decay=weight_decay)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=self.weight_decay)
        return stepwise(optimizer, partial(warmup_then_linear, steps=training_steps(self), warmup_steps=0))
