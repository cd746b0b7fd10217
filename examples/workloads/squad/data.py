"""SQuAD v1.1 (Rajpurkar et al., 2016) in its own JSON format, in batches for BERT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from lightning.pytorch import LightningDataModule
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from examples.workloads.files import require_files
from examples.workloads.squad.windows import Window, cut, read_squad

FILES = {"train": "train-v1.1.json", "validation": "dev-v1.1.json"}


class Batch(TypedDict):
    """Windows as tensors: int64 [windows, max_length], and positions [windows]."""

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor
    start_positions: Tensor
    end_positions: Tensor
    windows: list[Window]


def collate(windows: Sequence[Window], max_length: int) -> Batch:
    """Pads windows to the same length."""
    rows = [(window.tokens, window.types, [1] * len(window.tokens)) for window in windows]
    tokens, types, mask = torch.tensor(
        [[part + [0] * (max_length - len(part)) for part in row] for row in rows]
    ).unbind(1)
    return {
        "input_ids": tokens,
        "token_type_ids": types,
        "attention_mask": mask,
        "start_positions": torch.tensor([window.start for window in windows]),
        "end_positions": torch.tensor([window.end for window in windows]),
        "windows": list(windows),
    }


class Squad(LightningDataModule):
    """Windows of SQuAD's contexts; all windows of a question are validated by the same worker.

    Args:
        folder: Where ``train-v1.1.json`` and ``dev-v1.1.json`` are.
        vocabulary: BERT's ``vocab.txt``.
        batch_size: Windows per worker.
        max_length: Tokens of a window, with the question and three special ones.
        doc_stride: Tokens from the start of a window to the start of the next.
        max_question: Tokens of a question that are kept.
    """

    def __init__(
        self,
        folder: Path,
        vocabulary: Path,
        batch_size: int = 4,
        max_length: int = 384,
        doc_stride: int = 128,
        max_question: int = 64,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.vocabulary = Path(vocabulary)
        self.batch_size = batch_size
        self.max_length = max_length
        self.doc_stride = doc_stride
        self.max_question = max_question
        self.windows: dict[str, list[list[Window]]] = {}

    @override
    def setup(self, stage: str) -> None:
        source = "both from https://rajpurkar.github.io/SQuAD-explorer/dataset/ (35 MB)"
        require_files(self.folder, FILES.values(), source, "data.folder")
        source = "https://huggingface.co/google-bert/bert-large-uncased/resolve/main/vocab.txt (the same for BERT-base)"
        require_files(self.vocabulary.parent, [self.vocabulary.name], source, "data.vocabulary")
        wanted = ("validation",) if stage == "validate" else tuple(FILES)
        tokenizer = BertWordPieceTokenizer(str(self.vocabulary), lowercase=True)
        for split in wanted:
            if split not in self.windows:
                self.windows[split] = [
                    list(cut(tokenizer, question, self.max_length, self.doc_stride, self.max_question))
                    for question in read_squad(self.folder / FILES[split])
                ]

    def _loader(self, windows: list[Window], sampler: DistributedSampler[Window] | None) -> DataLoader[Window]:
        return DataLoader(
            windows,  # type: ignore[arg-type]  # a list is a data set: torch asks for its items and length only
            self.batch_size,
            sampler=sampler,
            drop_last=sampler is not None,
            collate_fn=lambda batch: collate(batch, self.max_length),
        )

    @override
    def train_dataloader(self) -> DataLoader[Window]:
        rank, workers = self._share()
        windows = [window for question in self.windows["train"] for window in question]
        return self._loader(windows, DistributedSampler(windows, workers, rank, drop_last=True))  # type: ignore[arg-type]  # see above

    @override
    def val_dataloader(self) -> DataLoader[Window]:
        rank, workers = self._share()
        return self._loader(
            [window for question in self.windows["validation"][rank::workers] for window in question], None
        )

    def _share(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
