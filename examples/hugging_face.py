"""A Hugging Face model in a LightningModule: ``python hugging_face.py`` trains a small BERT on two CPU workers.

Nothing is downloaded: the model has random weights, and learns whether a sentence has more words of one half of the
vocabulary or of the other. With a model of yours: ``AutoModelForSequenceClassification.from_pretrained(...)``.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from lightning_safusion import SAFusionStrategy

WORDS, LENGTH = 200, 15


class Classifier(LightningModule):
    """Fine-tunes a model with a head for classes; its loss comes from the model.

    Args:
        model: Takes ``input_ids`` and ``labels``.
        lr: Learning rate of AdamW.
    """

    def __init__(self, model: PreTrainedModel, lr: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, labels = batch
        hits = self.model(input_ids=tokens).logits.argmax(dim=1) == labels
        self.log("accuracy", hits.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def sentences(count: int, seed: int) -> TensorDataset:
    """Sentences (int64 [15]), and whether most of their words are in the second half of the vocabulary (0 or 1)."""
    tokens = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, ((tokens >= WORDS // 2).sum(dim=1) > LENGTH // 2).long())


def main() -> None:
    """Trains on two workers of this machine."""
    seed_everything(0)
    config = BertConfig(  # two classes, as by default
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=SAFusionStrategy(), max_epochs=4, logger=False)
    trainer.fit(
        Classifier(model),
        DataLoader(sentences(4096, seed=1), batch_size=32, shuffle=True),
        DataLoader(sentences(1024, seed=2), batch_size=256),
    )
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
