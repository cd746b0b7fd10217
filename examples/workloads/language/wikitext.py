"""WikiText-2 (Merity et al., 2017), word by word."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from examples.workloads.files import require_files
from examples.workloads.language.tokens import Columns, Vocabulary
from examples.workloads.sharing import SharedData

SPLITS = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}


class WikiText2(SharedData):
    """Columns of words, for a model that carries its state from batch to batch.

    Args:
        folder: Where ``wiki.train.tokens``, ``wiki.valid.tokens`` and ``wiki.test.tokens`` are.
        vocabulary_size: Words that have a number; 33278 are all words of WikiText-2.
        batch_size: Columns per worker.
        window: Words of a column in a batch (truncated back-propagation through time).
    """

    def __init__(self, folder: Path, vocabulary_size: int, batch_size: int = 80, window: int = 70) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.vocabulary_size = vocabulary_size
        self.batch_size = batch_size
        self.window = window
        self.texts: dict[str, Tensor] = {}

    @override
    def setup(self, stage: str) -> None:
        if self.texts:
            return
        source = "https://wikitext.smerity.com/wikitext-2-v1.zip (4 MB), which holds these files"
        require_files(self.folder, SPLITS.values(), source, "data.folder")
        vocabulary = Vocabulary(self.folder / SPLITS["train"], self.vocabulary_size)
        self.texts = {split: vocabulary.encode(self.folder / name) for split, name in SPLITS.items()}

    def _loader(self, split: str, pad: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        columns = Columns(self.texts[split], self.batch_size, self.window, self.rank, self.workers, pad)
        return DataLoader(columns, batch_size=None)

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("train", pad=False)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("validation", pad=True)

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("test", pad=True)
