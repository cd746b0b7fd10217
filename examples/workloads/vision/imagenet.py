"""ImageNet (ILSVRC 2012) as folders of JPEG files, one for each class."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PIL import Image
from torch import Tensor
from typing_extensions import override

from examples.workloads.files import require_files
from examples.workloads.vision.images import ImageData, Images, Transform, center_crop, random_crop, to_tensor

FOLDERS = {True: "train", False: "val"}
_ENDINGS = {".jpeg", ".jpg", ".png"}


class ImageFolder(Images):
    """Images in one folder per class; classes are numbered in the order of their folders' names.

    Args:
        folder: The folder of folders.
        transform: Makes all images equally large.

    Raises:
        ValueError: If no class has an image.
    """

    def __init__(self, folder: Path, transform: Transform) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.images = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _ENDINGS
        ]
        if not self.images:
            raise ValueError(f"{folder} has no images: one folder per class is expected, such as n01440764/*.JPEG")
        self.transform = transform

    @override
    def __len__(self) -> int:
        return len(self.images)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.images[index]
        with Image.open(path) as image:
            return to_tensor(self.transform(image.convert("RGB"))), label


class ImageNet(ImageData):
    """ImageNet; a random part of every training image is used, the middle of validation images.

    Args:
        folder: Where ``train`` and ``val`` are, each with a folder per class.
        batch_size: Images per worker.
        loaders: Processes per worker that read images; 0: the worker itself.
        size: Height and width of the images in pixels.
    """

    def __init__(self, folder: Path, batch_size: int = 32, loaders: int = 4, size: int = 224) -> None:
        super().__init__(folder, batch_size, loaders)
        self.size = size

    @override
    def samples(self, train: bool) -> Images:
        return ImageFolder(self.folder / FOLDERS[train], partial(random_crop if train else center_crop, size=self.size))

    @override
    def setup(self, stage: str) -> None:
        source = (
            "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from https://image-net.org/download-images (144 GB; "
            "an account is needed), unpacked into one folder per class, such as train/n01440764/*.JPEG and "
            "val/n01440764/*.JPEG"
        )
        require_files(self.folder, FOLDERS.values(), source, "data.folder")
