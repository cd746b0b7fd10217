"""A word-level LSTM language model, as in PyTorch's ``word_language_model`` example, which the papers train."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.text import Perplexity
from typing_extensions import override

from examples.workloads.language.tokens import IGNORED

State = tuple[Tensor, Tensor]
Batch = tuple[Tensor, Tensor]  # words and the words that follow them


class LSTMLanguageModel(LightningModule):
    """Predicts each next word; the state goes on from batch to batch within an epoch.

    Args:
        vocabulary_size: Rows of the embedding, and of the output.
        embedding: Size of a word's vector.
        hidden: Size of the state of each layer.
        layers: Number of LSTM layers.
        dropout: Share of the embeddings and of each layer's outputs that is dropped.
        lr: Learning rate of Adam for one worker; it is multiplied by the number of workers.
        weight_decay: L2 penalty in Adam.
        plateau_factor: Factor of the learning rate when the validation's perplexity has stopped falling.
        plateau_patience: Epochs without progress before that.
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding: int = 500,
        hidden: int = 500,
        layers: int = 2,
        dropout: float = 0.5,
        lr: float = 0.001,
        weight_decay: float = 1.2e-6,
        plateau_factor: float = 0.5,
        plateau_patience: int = 3,
    ) -> None:
        super().__init__()
        self.lr = lr
        self.weight_decay = weight_decay
        self.plateau_factor = plateau_factor
        self.plateau_patience = plateau_patience
        self.embed = nn.Embedding(vocabulary_size, embedding)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.head = nn.Linear(hidden, vocabulary_size)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        self.state: State | None = None
        self._training_state: State | None = None
        self.perplexity = Perplexity(ignore_index=IGNORED)

    @override
    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Scores of every next word.

        Args:
            words: int64 [rows, columns].
            state: What the last call returned for the rows before; nothing at the start of a text.

        Returns:
            Scores [rows, columns, vocabulary_size], and the state behind the last row.
        """
        hidden, state = self.lstm(self.drop(self.embed(words)), state)
        return self.head(self.drop(hidden)), state

    def _scores(self, words: Tensor) -> Tensor:
        scores, (hidden, cell) = self(words, self.state)
        self.state = hidden.detach(), cell.detach()
        return scores

    def _forget(self) -> None:
        self.state = None

    @override
    def on_train_epoch_start(self) -> None:
        self._forget()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        words, targets = batch
        loss = functional.cross_entropy(self._scores(words).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def _measure(self, batch: Batch, name: str) -> None:
        words, targets = batch
        self.perplexity.update(self._scores(words), targets)
        self.log(name, self.perplexity, prog_bar=True, on_step=False, on_epoch=True)

    @override
    def on_validation_epoch_start(self) -> None:
        self._training_state = self.state  # a validation in the middle of an epoch must not break the text
        self._forget()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(batch, "val_perplexity")

    @override
    def on_validation_epoch_end(self) -> None:
        self.state = self._training_state

    @override
    def on_test_epoch_start(self) -> None:
        self._forget()

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(batch, "test_perplexity")

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.Adam(
            self.parameters(), self.lr * self.trainer.world_size, weight_decay=self.weight_decay
        )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=self.plateau_factor, patience=self.plateau_patience
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_perplexity"}}
