"""CIFAR-100 (Krizhevsky, 2009) in its own Python format."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from typing_extensions import override

from examples.workloads.files import require_files
from examples.workloads.vision.images import ImageData, Images, Transform, augment_small, to_tensor

FILES = {True: "train", False: "test"}


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays and plain values; a file that would run anything else is refused."""

    _ALLOWED = {"_reconstruct", "ndarray", "dtype", "_codecs.encode"}

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy.core.multiarray":  # what the published files name; NumPy 1.26 and later have moved it
            module = "numpy._core.multiarray"
        qualified = name if module.split(".")[0] == "numpy" else f"{module}.{name}"
        if qualified not in self._ALLOWED:
            raise pickle.UnpicklingError(f"CIFAR's files hold arrays, this one wants {module}.{name}: download it anew")
        return super().find_class(module, name)


class Cifar(Images):
    """One file of CIFAR-100.

    Args:
        path: A pickled dictionary with ``b"data"`` (uint8 [images, 3072]: red, green, blue, row by row) and
            ``b"fine_labels"``.
        transform: Applied to each image; nothing: as it is.
    """

    def __init__(self, path: Path, transform: Transform | None) -> None:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        self.images = np.ascontiguousarray(content[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        self.labels: list[int] = content[b"fine_labels"]
        self.transform = transform

    @override
    def __len__(self) -> int:
        return len(self.labels)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index])
        return to_tensor(self.transform(image) if self.transform else image), self.labels[index]


class Cifar100(ImageData):
    """CIFAR-100; training images are shifted, mirrored and turned.

    Args:
        folder: Where ``train`` and ``test`` are: the folder ``cifar-100-python``.
        batch_size: Images per worker.
        loaders: Processes per worker that read images; 0: the worker itself.
    """

    @override
    def samples(self, train: bool) -> Images:
        return Cifar(self.folder / FILES[train], augment_small if train else None)

    @override
    def setup(self, stage: str) -> None:
        source = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz (161 MB), which holds these files"
        require_files(self.folder, FILES.values(), source, "data.folder")
