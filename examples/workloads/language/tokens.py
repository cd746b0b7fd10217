"""Texts as one long row of tokens, cut into columns that every worker reads from top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

#: Target of the positions behind the end of a text; losses and metrics leave it out.
IGNORED = -100
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"


def words(path: Path) -> Iterator[str]:
    """The words of a file in WikiText's format (separated by blanks), each line closed by ``<eos>``."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield from line.split()
            yield END_OF_LINE


class Vocabulary:
    """Numbers for the most frequent words; all others, and words never seen, become ``<unk>``.

    Args:
        path: The training text.
        size: Number of entries, ``<unk>`` among them.

    Raises:
        ValueError: If the text has fewer different words than ``size``: the model would have rows that nothing trains.
    """

    def __init__(self, path: Path, size: int) -> None:
        counts = Counter(words(path))
        del counts[UNKNOWN]
        if len(counts) + 1 < size:
            raise ValueError(
                f"{path} has {len(counts) + 1} different words with {UNKNOWN}, fewer than vocabulary_size={size}: "
                "give that number to data and model"
            )
        # ties in the order of first appearance: the same numbers on every machine
        self.words = [UNKNOWN, *(word for word, _ in counts.most_common(size - 1))]
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, path: Path) -> Tensor:
        """A whole file as numbers (int64 [tokens])."""
        return torch.tensor([self._numbers.get(word, 0) for word in words(path)])


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text for truncated back-propagation through time.

    The text is cut into ``workers * batch_size`` columns of equal length, and every worker gets ``batch_size`` adjacent
    ones. Item ``i`` of a worker continues its item ``i - 1``, so that a recurrent state can be carried over.

    Args:
        tokens: The text, int64 [tokens].
        batch_size: Columns per worker.
        window: Rows per item; the last item may have fewer.
        rank: This worker.
        workers: Number of workers.
        pad: Fill the last column with :data:`IGNORED` targets so that every token is predicted once; otherwise tokens
            that do not fill a row are dropped, and all workers have equally many targets.

    Raises:
        ValueError: If the text has not a single row.
    """

    def __init__(self, tokens: Tensor, batch_size: int, window: int, rank: int, workers: int, pad: bool) -> None:
        columns = workers * batch_size
        inputs, targets = tokens[:-1], tokens[1:]
        missing = -len(inputs) % columns
        if pad:
            inputs = torch.cat([inputs, inputs.new_zeros(missing)])
            targets = torch.cat([targets, targets.new_full((missing,), IGNORED)])
        rows = len(inputs) // columns
        if rows == 0:
            raise ValueError(f"a text of {len(tokens)} tokens is too short for {workers} x {batch_size} columns")
        mine = slice(rank * batch_size, (rank + 1) * batch_size)
        self.inputs = inputs[: rows * columns].view(columns, rows)[mine].t().contiguous()
        self.targets = targets[: rows * columns].view(columns, rows)[mine].t().contiguous()
        self.window = window

    def __len__(self) -> int:
        return -(-len(self.inputs) // self.window)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = slice(index * self.window, (index + 1) * self.window)
        return self.inputs[rows], self.targets[rows]
