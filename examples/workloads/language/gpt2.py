"""GPT-2 (Radford et al., 2019), trained on as a causal language model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel
from typing_extensions import override

from examples.workloads.pretrained import build
from examples.workloads.schedules import stepwise, training_steps, warmup_then_linear


class GPT2(LightningModule):
    """Predicts each next token of a block; perplexity per token.

    Args:
        hidden: Width.
        layers: Number of blocks.
        heads: Attention heads.
        vocabulary_size: Entries of ``vocab.json``.
        positions: Tokens of a block at most.
        pretrained: Folder with ``config.json`` and ``model.safetensors`` of a GPT-2 of these sizes. Nothing: random
            weights.
        lr: Learning rate of AdamW, which falls linearly to zero; it is not multiplied by the number of workers.
        weight_decay: Of AdamW.
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        vocabulary_size: int = 50257,
        positions: int = 1024,
        pretrained: Path | None = None,
        lr: float = 5e-5,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.lr = lr
        self.weight_decay = weight_decay
        config = GPT2Config(
            vocab_size=vocabulary_size,
            n_positions=positions,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            bos_token_id=vocabulary_size - 1,
            eos_token_id=vocabulary_size - 1,
            use_cache=False,  # nothing is generated
        )
        self.net = build(GPT2LMHeadModel, config, pretrained, "openai-community", "model.pretrained", new="lm_head")
        self.perplexity = Perplexity()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = batch.long()
        loss = self.net(input_ids=tokens, labels=tokens).loss  # transformers shifts the labels by one
        self.log("loss", loss, prog_bar=True)
        return loss

    def _measure(self, batch: Tensor, name: str) -> None:
        tokens = batch.long()
        self.perplexity.update(self.net(input_ids=tokens).logits[:, :-1], tokens[:, 1:])
        self.log(name, self.perplexity, prog_bar=True, on_step=False, on_epoch=True)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._measure(batch, "val_perplexity")

    @override
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._measure(batch, "test_perplexity")

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=self.weight_decay)
        return stepwise(optimizer, partial(warmup_then_linear, steps=training_steps(self), warmup_steps=0))
