"""The data of the tasks: what every machine with this package and Python has. Batches depend on seed and step only."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lab.tasks.models import NAMES
from lightning_safusion.tools.demo.digits import load_digits

Batch = tuple[Tensor, Tensor]

# Folders of the standard library that are no ordinary source text, or that some distributions leave out.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})
# One file in so many is held out.
_HELD_OUT = 8
_TRAINING_BYTES, _VALIDATION_BYTES = 2 << 20, 1 << 18


class Data(ABC):
    """Batches of one run. Workers share every global batch, so that it is the same for any number of them.

    Args:
        seed: Decides the batches.
        batch: Samples of all workers together in a step.

    Attributes:
        made_of: Packages whose version decides the data.
    """

    made_of: ClassVar[tuple[str, ...]] = ()

    def __init__(self, seed: int, batch: int) -> None:
        self.seed = seed
        self.batch = batch

    @abstractmethod
    def samples(self, step: int) -> Batch:
        """Inputs and classes of all workers in a step."""

    @abstractmethod
    def validation(self) -> Batch:
        """Inputs and classes that are never trained on."""

    def shards(self, step: int, workers: int) -> list[Batch]:
        """The samples of a step, an equal part for each worker.

        Raises:
            ValueError: If the batch cannot be divided so.
        """
        if self.batch % workers:
            raise ValueError(f"{self.batch} samples per step cannot be shared by {workers} workers equally")
        inputs, classes = self.samples(step)
        return list(zip(inputs.chunk(workers), classes.chunk(workers), strict=True))


class Digits(Data):
    """Handwritten digits (scikit-learn), shuffled anew in every epoch; the images left over in one are dropped.

    Args:
        seed: Decides which images are held out, and the batches.
        batch: Images of all workers in a step.
    """

    def __init__(self, seed: int, batch: int) -> None:
        super().__init__(seed, batch)
        training, validation = load_digits(seed)
        self._images, self._labels = training.tensors
        images, labels = validation.tensors
        self._held_out = images, labels
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def samples(self, step: int) -> Batch:
        epoch, place = divmod(step, len(self._labels) // self.batch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._labels), generator=generator)
        chosen = self._order[place * self.batch : (place + 1) * self.batch]
        return self._images[chosen], self._labels[chosen]

    def validation(self) -> Batch:
        return self._held_out


class DigitsTwice(Digits):
    """Handwritten digits for a network with two heads: each image has its class twice, int64 [batch, 2].

    Args:
        seed: Decides which images are held out, and the batches.
        batch: Images of all workers in a step.
    """

    def samples(self, step: int) -> Batch:
        images, labels = super().samples(step)
        return images, _twice(labels)

    def validation(self) -> Batch:
        images, labels = super().validation()
        return images, _twice(labels)


def _twice(labels: Tensor) -> Tensor:
    return labels[:, None].expand(-1, 2)


class DigitsInNoise(Digits):
    """Handwritten digits with noise of their own in every step, so that the loss stays far from zero.

    Args:
        seed: Decides which images are held out, the batches, and the noise.
        batch: Images of all workers in a step.
    """

    strength: ClassVar[float] = 0.4  #: standard deviation, of images between 0 and 1

    def samples(self, step: int) -> Batch:
        images, labels = super().samples(step)
        return images + self._noise(images, self.seed * 1_000_003 + step), labels

    def validation(self) -> Batch:
        images, labels = super().validation()
        return images + self._noise(images, 0), labels

    def _noise(self, images: Tensor, seed: int) -> Tensor:
        return self.strength * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))


class NoiseOfDigits(DigitsInNoise):
    """The same, and the noise itself, which is to be predicted (Ho et al., NeurIPS 2020)."""

    def samples(self, step: int) -> Batch:
        images, _ = Digits.samples(self, step)
        noise = self._noise(images, self.seed * 1_000_003 + step)
        return images + noise, noise

    def validation(self) -> Batch:
        images, _ = Digits.validation(self)
        noise = self._noise(images, 0)
        return images + noise, noise


class Text(Data):
    """Sequences of bytes from the sources of Python's standard library; every byte but the first is to be predicted.

    Args:
        seed: Decides where the sequences of a batch begin.
        batch: Sequences of all workers in a step.
        length: Bytes that are predicted in each.
        held_out: Sequences of the validation set, spread evenly over the files that are held out.
    """

    made_of: ClassVar[tuple[str, ...]] = ("python",)

    def __init__(self, seed: int, batch: int, length: int = 64, held_out: int = 256) -> None:
        super().__init__(seed, batch)
        self.length = length
        self._training, held_out_text = self.texts()
        starts = torch.linspace(0, len(held_out_text) - length - 1, held_out).long()
        self._held_out = self._cut(held_out_text, starts)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Bytes to train on, and held-out ones."""
        return standard_library()

    def to(self, device: torch.device) -> Text:
        """The same text on a device, where batches are then cut out of it; the host does not wait for them."""
        self._training, (inputs, classes) = self._training.to(device), self._held_out
        self._held_out = inputs.to(device), classes.to(device)
        return self

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        offsets = torch.arange(self.length + 1, device=text.device)
        sequences = text[starts.to(text.device, non_blocking=True)[:, None] + offsets].long()
        return sequences[:, :-1], sequences[:, 1:]

    def samples(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self._cut(
            self._training,
            torch.randint(len(self._training) - self.length, (self.batch,), generator=generator),
        )

    def validation(self) -> Batch:
        return self._held_out


class Prose(Text):
    """The same of English: the help topics of Python, the part of its documentation that comes with it.

    Args:
        seed: Decides where the sequences of a batch begin.
        batch: Sequences of all workers in a step.
    """

    def texts(self) -> tuple[Tensor, Tensor]:
        return help_topics()


class Headers(Text):
    """The same of C++: the header files that come with torch.

    Args:
        seed: Decides where the sequences of a batch begin.
        batch: Sequences of all workers in a step.
    """

    made_of = ("torch",)

    def texts(self) -> tuple[Tensor, Tensor]:
        return torch_headers()


class Restored(Prose):
    """English with a third of its bytes replaced by zero, and the English itself, which is to be predicted.

    Inputs are int64 [batch, 2, length]: the damaged sequence, and the whole one but for its last byte, which begins
    with a zero.

    Args:
        seed: Decides where the sequences of a batch begin, and what is replaced.
        batch: Sequences of all workers in a step.
    """

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        _, whole = super()._cut(text, starts)
        generator = torch.Generator().manual_seed(int(starts.sum()))
        kept = torch.rand(whole.shape, generator=generator) > 1 / 3
        before = torch.cat([torch.zeros_like(whole[:, :1]), whole[:, :-1]], 1)
        return torch.stack([whole * kept, before], 1), whole


class Names(Data):
    """Names that stand together in a file of the standard library: from eight of a file, a ninth is to be predicted.

    Inputs are int64 [batch, 1, 8], classes [batch, 1]: places in a vocabulary of the 4,096 most frequent names.

    Args:
        seed: Decides the names of a batch.
        batch: Samples of all workers in a step.
    """

    made_of = ("python",)

    def __init__(self, seed: int, batch: int) -> None:
        super().__init__(seed, batch)
        self._training, held_out = names_of_files()
        self._held_out = self._drawn(held_out, 4096, torch.Generator().manual_seed(0))

    def _drawn(self, files: list[Tensor], count: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(files), (count,), generator=generator).tolist()
        rows = torch.stack([files[i][torch.randperm(len(files[i]), generator=generator)[:9]] for i in chosen])
        return rows[:, None, :8], rows[:, 8:]

    def samples(self, step: int) -> Batch:
        return self._drawn(self._training, self.batch, torch.Generator().manual_seed(self.seed * 1_000_003 + step))

    def validation(self) -> Batch:
        return self._held_out


@cache
def names_of_files() -> tuple[list[Tensor], list[Tensor]]:
    """Distinct names of each file of the standard library, as places in a vocabulary: to train on, and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = (
        [set(re.findall(r"[A-Za-z_]\w{2,}", (root / name).read_text("utf-8", "replace"))) for name in names]
        for names in _files_of(root, ".py")
    )
    counts = Counter(name for names in training for name in names)
    vocabulary = {name: place for place, (name, _) in enumerate(sorted(counts.items(), key=lambda x: (-x[1], x[0])))}
    known = {name: place for name, place in vocabulary.items() if place < NAMES}
    first, second = (
        [torch.tensor(sorted(known[name] for name in names & known.keys())) for names in files]
        for files in (training, held_out)
    )
    return [row for row in first if len(row) > 8], [row for row in second if len(row) > 8]


@cache
def help_topics() -> tuple[Tensor, Tensor]:
    """Python's help topics as uint8 vectors: to train on, and one of eight, by a hash of their names, held out."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out, training = names[::_HELD_OUT], [name for place, name in enumerate(names) if place % _HELD_OUT]
    first, second = (
        torch.from_numpy(np.frombuffer("\n".join(topics[name] for name in chosen).encode(), np.uint8).copy())
        for chosen in (training, held_out)
    )
    return first, second


@cache
def standard_library() -> tuple[Tensor, Tensor]:
    """The sources of Python's standard library as uint8 vectors: 2 MiB to train on, 256 KiB of other files.

    Files come in the order of a hash of their names, the same on every machine with this version of Python.

    Raises:
        FileNotFoundError: If there is not so much of it.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = _files_of(root, ".py")
    return _text(root, training, _TRAINING_BYTES), _text(root, held_out, _VALIDATION_BYTES)


@cache
def torch_headers() -> tuple[Tensor, Tensor]:
    """The C++ headers that come with torch, as :func:`standard_library` has Python's sources; errors as there."""
    root = Path(torch.__file__).parent / "include"
    training, held_out = _files_of(root, ".h")
    return _text(root, training, _TRAINING_BYTES), _text(root, held_out, _VALIDATION_BYTES)


def _files_of(root: Path, suffix: str) -> tuple[list[str], list[str]]:
    """Files to train on, and held out, in the order of a hash of their names."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [each for each in folders if each not in _LEFT_OUT]
        names += [(Path(folder) / file).relative_to(root).as_posix() for file in files if file.endswith(suffix)]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [name for place, name in enumerate(names) if place % _HELD_OUT], names[::_HELD_OUT]


def _text(root: Path, names: list[str], size: int) -> Tensor:
    text = bytearray()
    for name in names:
        if len(text) >= size:
            break
        text += (root / name).read_bytes()
    if len(text) < size:
        raise FileNotFoundError(
            f"the sources in {root} have {len(text)} bytes, {size} are needed: use a Python and a torch that were "
            "installed with them"
        )
    return torch.from_numpy(np.frombuffer(bytes(text[:size]), np.uint8).copy())
