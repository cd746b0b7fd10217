"""BERT that marks the first and the last token of an answer (Devlin et al., 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.text import SQuAD
from transformers import BertConfig, BertForQuestionAnswering
from typing_extensions import override

from examples.workloads.pretrained import build
from examples.workloads.schedules import stepwise, training_steps, warmup_then_linear
from examples.workloads.squad.data import Batch
from examples.workloads.squad.windows import Question, Window


def best_span(window: Window, start: Tensor, end: Tensor, max_tokens: int) -> tuple[float, str]:
    """The answer with the highest sum of scores in one window.

    Args:
        window: Where to look; an answer begins at a token that the window owns, and ends in its part of the context.
        start: Scores of the first token, for every position of the window (float [positions]).
        end: Scores of the last token.
        max_tokens: Tokens of an answer at most.

    Returns:
        The sum of both scores, and the answer as it is spelt in the context; minus infinity where there is none.
    """
    part = slice(window.first, window.first + len(window.offsets))
    sums = start[part, None].double() + end[None, part].double()
    owned = torch.from_numpy(window.owned).to(sums.device)
    # a band above the diagonal: the end is not before the start, and not too far behind it
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(max_tokens - 1) & owned[:, None]
    if not allowed.any():
        return float("-inf"), ""
    sums = sums.masked_fill(~allowed, float("-inf"))
    first, last = divmod(int(sums.argmax()), len(sums))
    return float(sums[first, last]), window.text(window.first + first, window.first + last)


def as_published(best: Mapping[Question, tuple[float, str]]) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Predictions and targets in the form of SQuAD's evaluation, which torchmetrics takes."""
    predictions = [{"id": question.id, "prediction_text": text} for question, (_, text) in best.items()]
    targets = [
        {
            "id": question.id,
            "answers": {
                "text": [answer.text for answer in question.answers],
                "answer_start": [answer.start for answer in question.answers],
            },
        }
        for question in best
    ]
    return predictions, targets


class BertSquad(LightningModule):
    """Question answering; exact match and F1 in percent.

    Args:
        hidden: Width.
        layers: Number of blocks.
        heads: Attention heads.
        intermediate: Width of the layer inside each block's feed-forward part.
        vocabulary_size: Entries of ``vocab.txt``.
        max_length: Positions that have an embedding; 512 in the published models.
        pretrained: Folder with ``config.json`` and ``model.safetensors`` of a BERT of these sizes. Nothing: random
            weights.
        lr: Learning rate of AdamW; it is not multiplied by the number of workers.
        weight_decay: Of all tensors but biases and norms.
        warmup_share: Share of the steps in which the rate rises from zero; after that it falls linearly to zero.
        max_answer: Tokens of an answer at most.
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        intermediate: int,
        vocabulary_size: int = 30522,
        max_length: int = 512,
        pretrained: Path | None = None,
        lr: float = 3e-5,
        weight_decay: float = 0.01,
        warmup_share: float = 0.1,
        max_answer: int = 30,
    ) -> None:
        super().__init__()
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_share = warmup_share
        self.max_answer = max_answer
        config = BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=max_length,
        )
        self.net = build(
            BertForQuestionAnswering, config, pretrained, "google-bert", "model.pretrained", new="qa_outputs"
        )
        self.squad = SQuAD()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.net(**{name: value for name, value in batch.items() if name != "windows"}).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        scores = self.net(
            input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"], attention_mask=batch["attention_mask"]
        )
        starts, ends = scores.start_logits.float().cpu(), scores.end_logits.float().cpu()
        best: dict[Question, tuple[float, str]] = {}
        for window, start, end in zip(batch["windows"], starts, ends, strict=True):
            found = best_span(window, start, end, self.max_answer)
            best[window.question] = max(best.get(window.question, found), found, key=itemgetter(0))
        self.squad.update(*as_published(best))

    @override
    def on_validation_epoch_end(self) -> None:
        # logged here: the metric has two values
        result = self.squad.compute()
        self.squad.reset()
        # all workers have the same values; as their mean they can be monitored, without a warning of Lightning's
        self.log_dict({f"val_{name}": value for name, value in result.items()}, prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        plain = [p for name, p in self.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
        decayed = [p for name, p in self.named_parameters() if not (name.endswith("bias") or "LayerNorm" in name)]
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        steps = training_steps(self)
        factor = partial(warmup_then_linear, steps=steps, warmup_steps=self.warmup_share * steps)
        return stepwise(torch.optim.AdamW(groups, self.lr), factor)
