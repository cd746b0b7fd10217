"""WikiText-103 (Merity et al., 2017) as raw text, in blocks of GPT-2's byte pairs."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from examples.workloads.files import require_files
from examples.workloads.sharing import SharedData

SPLITS = {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}
VOCABULARY = ("vocab.json", "merges.txt")
_LINES = 10_000  # encoded at a time: bounds the memory


def encode(path: Path, tokenizer: ByteLevelBPETokenizer) -> Tensor:
    """A whole file as numbers (int32 [tokens]); line ends are kept."""
    parts = []
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(file)
    for start in range(0, len(lines), _LINES):
        encoded = tokenizer.encode_batch(lines[start : start + _LINES])
        parts += [torch.tensor(line.ids, dtype=torch.int32) for line in encoded]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)


class WikiText103(SharedData):
    """Blocks of equal length, cut from the text without regard to articles; the rest of a split is dropped.

    Args:
        folder: Where ``wiki.train.raw``, ``wiki.valid.raw`` and ``wiki.test.raw`` are.
        vocabulary: Folder of GPT-2's ``vocab.json`` and ``merges.txt``.
        batch_size: Blocks per worker.
        block: Tokens in a block.
    """

    def __init__(self, folder: Path, vocabulary: Path, batch_size: int = 2, block: int = 1024) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.vocabulary = Path(vocabulary)
        self.batch_size = batch_size
        self.block = block
        self.blocks: dict[str, Tensor] = {}

    @override
    def setup(self, stage: str) -> None:
        source = "https://wikitext.smerity.com/wikitext-103-raw-v1.zip (183 MB), which holds these files"
        require_files(self.folder, SPLITS.values(), source, "data.folder")
        source = "both from https://huggingface.co/openai-community/gpt2-large"
        require_files(self.vocabulary, VOCABULARY, source, "data.vocabulary")
        tokenizer = ByteLevelBPETokenizer(*(str(self.vocabulary / name) for name in VOCABULARY))
        wanted = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}[stage]
        for split in wanted:
            if split not in self.blocks:
                tokens = encode(self.folder / SPLITS[split], tokenizer)
                whole = len(tokens) // self.block
                if whole == 0:
                    raise ValueError(
                        f"{self.folder / SPLITS[split]} has {len(tokens)} tokens, block={self.block} needs more"
                    )
                self.blocks[split] = tokens[: whole * self.block].view(whole, self.block)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return self.training_loader(self.blocks["train"], self.batch_size)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return self.held_out_loader(self.blocks["validation"], self.batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.held_out_loader(self.blocks["test"], self.batch_size)
