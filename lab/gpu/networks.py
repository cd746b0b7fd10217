"""The papers' networks from their configurations, with random weights and data that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """One of them.

    Args:
        module: Without which it cannot be made.
        make: Makes it, given whether it is small.
        samples: Of a batch, as in ``lab.architectures``.
        unit: What a sample is.
        length: Side of an image, or tokens of a sequence.
    """

    module: str
    make: Callable[[bool], nn.Module]
    samples: int
    unit: str
    length: int


def _vision(name: str) -> Callable[[bool], nn.Module]:
    def make(small: bool) -> nn.Module:
        from torchvision import models

        return models.get_model("resnet18" if small else name, weights=None)

    return make


def _transformer(kind: str, config: str, widths: Mapping[str, int], small: Mapping[str, int], **options: Any) -> Any:
    def make(tiny: bool) -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**(small if tiny else widths), **options)
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    return make


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
#: Most important first. The batches of ``lab.architectures``: dropout stays as published.
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "bert-large": Workload(
            "transformers",
            _transformer("BertForQuestionAnswering", "BertConfig", _LARGE, _SMALL),
            24,
            "sequences of 384 tokens",
            384,
        ),
        "gpt2-large": Workload(
            "transformers",
            _transformer(
                "GPT2LMHeadModel",
                "GPT2Config",
                {"n_embd": 1280, "n_layer": 36, "n_head": 20},
                {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300},
                use_cache=False,
            ),
            4,
            "sequences of 1024 tokens",
            1024,
        ),
        "vit-large": Workload(
            "transformers",
            _transformer("ViTForImageClassification", "ViTConfig", _LARGE, _SMALL, num_labels=1000),
            32,
            "images of 224 x 224",
            224,
        ),
        "resnet-152": Workload("torchvision", _vision("resnet152"), 32, "images of 224 x 224", 224),
        "vgg-19": Workload("torchvision", _vision("vgg19"), 32, "images of 224 x 224", 224),
    }
)


class Network(LightningModule):
    """A workload that is trained on one random batch.

    Args:
        name: Of :data:`WORKLOADS`; another one is a perceptron, which needs no package.
        small: For a rehearsal.
    """

    pixels: Tensor
    tokens: Tensor

    def __init__(self, name: str, small: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.name, work = name, WORKLOADS.get(name)
        self.samples = 2 if small or work is None else work.samples
        side = 32 if small or work is None else work.length
        self.net: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(3 * side**2, 40), nn.ReLU(), nn.Linear(40, 10))
        if work is not None:
            self.net = work.make(small)
        sequences = work is not None and work.unit.startswith("sequences")
        self.register_buffer("tokens", torch.randint(0, 300, (self.samples, side)), persistent=False)
        pixels = (
            torch.empty(0) if sequences else torch.randn(self.samples, 3, 224 if name == "vit-large" else side, side)
        )
        if name == "vit-large":
            pixels = torch.randn(self.samples, 3, 224, 224)
        self.register_buffer("pixels", pixels, persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.name == "bert-large":
            ends = self.tokens[:, 0] % self.tokens.shape[1]
            return cast(Tensor, self.net(input_ids=self.tokens, start_positions=ends, end_positions=ends).loss)
        if self.name == "gpt2-large":
            return cast(Tensor, self.net(input_ids=self.tokens, labels=self.tokens).loss)
        output = self.net(self.pixels)
        scores: Tensor = output if isinstance(output, Tensor) else output.logits
        return nn.functional.cross_entropy(scores.float(), self.tokens[:, 0] % scores.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-6, fused=self.device.type == "cuda")
