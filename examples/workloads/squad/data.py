"""SQuAD v1.1 (Rajpurkar et al., 2016) in its own JSON format, in batches for BERT."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from examples.workloads.files import require_files
from examples.workloads.sharing import SharedData
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
    tokens, types, mask = torch.zeros(3, len(windows), max_length, dtype=torch.int64)
    for row, window in enumerate(windows):
        length = len(window.tokens)
        tokens[row, :length] = torch.from_numpy(window.tokens)
        types[row, window.first : length] = 1
        mask[row, :length] = 1
    return {
        "input_ids": tokens,
        "token_type_ids": types,
        "attention_mask": mask,
        "start_positions": torch.tensor([window.start for window in windows]),
        "end_positions": torch.tensor([window.end for window in windows]),
        "windows": list(windows),
    }


class Squad(SharedData):
    """Windows of SQuAD's contexts.

    Args:
        folder: Where ``train-v1.1.json`` and ``dev-v1.1.json`` are.
        vocabulary: BERT's ``vocab.txt``.
        batch_size: Windows per worker in training, questions in validation.
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

    @override
    def train_dataloader(self) -> DataLoader[Window]:
        windows = [window for question in self.windows["train"] for window in question]
        return self.training_loader(windows, self.batch_size, collate_fn=partial(collate, max_length=self.max_length))

    @override
    def val_dataloader(self) -> DataLoader[list[Window]]:
        """Batches of questions with all their windows: the answer is the best one of them."""
        return self.held_out_loader(self.windows["validation"], self.batch_size, collate_fn=self._all_windows)

    def _all_windows(self, questions: Sequence[list[Window]]) -> Batch:
        return collate([window for question in questions for window in question], self.max_length)
