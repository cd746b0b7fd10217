"""Trainers on one device: transformers of known sizes on data that stay there, and what a step takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lab.gpu.device import Device
from lab.gpu.jobs import Echo
from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.transport.interface import Transport

#: Workers whose messages the only one decodes: they echo its own.
WORKERS = 8


class AmongEchoes(SAFusionStrategy):
    """The strategy as one of several workers, all of which send what this one sends: alone it would leave the job to
    DDP, since there is nothing to exchange."""

    def _make_transport(self, model: nn.Module) -> Transport:
        return Echo(WORKERS)


@dataclass(frozen=True)
class Shape:
    """Of a transformer.

    Args:
        words: In its vocabulary.
        width, layers, heads: Of its body.
        positions: Longest sentence that it knows.
        length: Words of a sentence.
        causal: It predicts each next word, with the embedding as its head; else one of two classes of a sentence.
    """

    words: int
    width: int
    layers: int
    heads: int
    positions: int
    length: int
    causal: bool = False


#: "bert-base" and "gpt2-medium" have the numbers of parameters of these models.
SHAPES = {
    "bert-base": Shape(30_522, 768, 12, 12, 512, 128),
    "gpt2-medium": Shape(50_257, 1024, 24, 16, 1024, 128, causal=True),
    "middle": Shape(8000, 256, 4, 4, 512, 64),
    "small": Shape(50, 16, 1, 2, 16, 8),
    "small causal": Shape(60, 16, 1, 2, 16, 8, causal=True),
}


class Transformer(LightningModule):
    """A transformer and its data. A batch is the number of sentences in it.

    Args:
        shape: Its shape.
        sentences: That it holds; the longest batch.
        seed: Of the sentences.
    """

    data: Tensor

    def __init__(self, shape: Shape, sentences: int, seed: int = 9) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shape = shape
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, dropout=0.0, batch_first=True, norm_first=shape.causal
        )
        self.body = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Identity() if shape.causal else nn.Linear(shape.width, 2)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, shape.words, (sentences, shape.length), generator=generator, device="cpu")
        self.register_buffer("data", drawn)

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        words, causal = self.data[:batch], self.shape.causal
        hidden = self.embedding(words) + self.positions.weight[: words.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], hidden.device) if causal else None
        hidden = self.body(hidden, mask, is_causal=causal)
        if causal:
            logits = nn.functional.linear(hidden[:, :-1], self.embedding.weight)
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
        return nn.functional.cross_entropy(self.head(hidden.mean(1)).float(), words[:, 0] % 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-5)


@dataclass(frozen=True)
class Phase:
    """Steps of one batch.

    Args:
        batch: Sentences.
        warm, timed: Steps that are not timed, and those after them.
    """

    batch: int
    warm: int
    timed: int


class _Batches(IterableDataset[int]):
    """The batch of every step; a last one ends the last step that is timed."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = phases

    def __iter__(self) -> Iterator[int]:
        for phase in self._phases:
            yield from [phase.batch] * (phase.warm + phase.timed)
        yield self._phases[-1].batch


@dataclass
class Times:
    """Seconds of the steps of a phase: those of usual windows, and of those that record when everything happened."""

    usual: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median of the usual ones; of all where none is usual."""
        return statistics.median(self.usual or self.recorded)


class Steps(Callback):
    """Times steps, from the beginning of one to that of the next, by the clock of the device.

    Args:
        place: The device.
        phases: The steps.

    Attributes:
        times: By phase, after training.
        plain_ddp: Why plain DDP was used at the end; None with the engine.
    """

    def __init__(self, place: Device, phases: Sequence[Phase]) -> None:
        self.place, self.phases = place, list(phases)
        self.times = [Times() for _ in phases]
        self.plain_ddp: str | None = None
        self._begins: list[Any] = []
        self._recorded: list[bool] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, SAFusionStrategy):
            trainer.strategy.settings.density.opens = False  # steps are timed as they will last

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        record = getattr(trainer.strategy, "record", None)  # of the window that has just ended
        if batch_idx:
            self._recorded.append(record is not None and record.surveyed)
        self._begins.append(self.place.moment())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.place.wait()
        if isinstance(trainer.strategy, SAFusionStrategy):
            self.plain_ddp = trainer.strategy.figures()["plain_ddp"]
        step = 0
        for phase, times in zip(self.phases, self.times, strict=True):
            for each in range(step + phase.warm, step + phase.warm + phase.timed):
                seconds = self.place.seconds(self._begins[each], self._begins[each + 1])
                (times.recorded if self._recorded[each] else times.usual).append(seconds)
            step += phase.warm + phase.timed


def fitted(steps: Steps, model: LightningModule, strategy: Any, **options: Any) -> Trainer:
    """Trains through the phases of a callback.

    Args:
        steps: The callback.
        model: Trains on batches that are numbers of sentences.
        strategy: Of the Trainer.
        options: More of the Trainer's.
    """
    trainer = Trainer(
        accelerator="gpu" if steps.place.cuda else "cpu",
        devices=1,
        strategy=strategy,
        callbacks=[steps],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(_Batches(steps.phases), batch_size=None))
    return trainer
