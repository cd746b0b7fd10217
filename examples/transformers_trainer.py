"""transformers.Trainer with a mixin before it, which is all of SAFusion. It resumes from its checkpoint.

torchrun --nproc-per-node 2 transformers_trainer.py

Nothing is downloaded: a small BERT with random weights learns whether a sentence has more words of one half of the
vocabulary or of the other. With a model of yours: ``AutoModelForSequenceClassification.from_pretrained(...)``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from lightning_safusion.hugging_face import SAFusionTrainerMixin

EPOCHS, CHECKPOINTS = 4, Path("transformers_trainer")
WORDS, LENGTH = 200, 15


class Trainer(SAFusionTrainerMixin, transformers.Trainer):
    """Sends sparse gradients."""

    safusion = {"collective": "allgather"}  # "auto", the default, may choose DDP


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences (int64 [15]), and whether most of their words are in the second half of the vocabulary (0 or 1)."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": ((tokens >= WORDS // 2).sum() > LENGTH // 2).long()}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of the sentences that are in the right class."""
    hits = torch.as_tensor(prediction.predictions).argmax(dim=1) == torch.as_tensor(prediction.label_ids)
    return {"accuracy": float(hits.float().mean())}


def main() -> None:
    """Trains on the processes that torchrun has started."""
    CHECKPOINTS.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(CHECKPOINTS),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        ddp_find_unused_parameters=False,  # or nothing is sent before the backward pass ends
        use_cpu=not torch.cuda.is_available(),
    )
    transformers.set_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=Sentences(4096, seed=1),
        eval_dataset=Sentences(1024, seed=2),
        compute_metrics=accuracy,
    )
    latest = get_last_checkpoint(str(CHECKPOINTS))
    if latest is not None and trainer.is_world_process_zero():
        print(f"goes on from {latest}", flush=True)
    trainer.train(resume_from_checkpoint=latest)  # with the residuals, also on more or fewer workers
    results = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {results['eval_accuracy']:.3f}")
        for attached in trainer.handler.attached:  # none with one worker
            figures = attached.figures()
            print(f"{figures['bytes_sent'] or 0} bytes in the last step, DDP sends {figures['dense_bytes'] or 0}")


if __name__ == "__main__":
    main()
