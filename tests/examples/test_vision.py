"""ResNet-152 and VGG-19: the data sets' formats, augmentation, the schedule, and training of the tiny ones."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch import nn

from examples.workloads.make_tiny_data import make_cifar100
from examples.workloads.schedules import warmup_then_drops, warmup_then_linear
from examples.workloads.vision.cifar import Cifar, Cifar100
from examples.workloads.vision.classifier import ImageClassifier
from examples.workloads.vision.imagenet import ImageNet
from examples.workloads.vision.images import augment_small, center_crop, random_crop, to_tensor
from examples.workloads.vision.networks import VGG, ResNet
from tests.examples.workload_runs import shared

STATISTICS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def pixels(seed: int = 0, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, 3, 32, 32), dtype=np.uint8)


def write_cifar(path: Path, images: np.ndarray) -> None:
    """As the published files: pickled by Python 2 with a NumPy of that time."""
    content = {b"data": images.reshape(len(images), -1), b"fine_labels": [7, 99, 0], b"filenames": [b"a.png"] * 3}
    pickled = pickle.dumps(content, protocol=2)
    path.write_bytes(pickled.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert b"cnumpy.core.multiarray\n" in path.read_bytes()


def test_cifar_is_read_as_published(tmp_path: Path) -> None:
    write_cifar(tmp_path / "train", pixels())
    samples = Cifar(tmp_path / "train", None)
    assert len(samples) == 3
    for index, label in enumerate([7, 99, 0]):
        image, found = samples[index]
        assert found == label
        assert torch.equal(image, torch.from_numpy(pixels()[index]))


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(pickle.dumps(Path, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="wants pathlib"):
        Cifar(tmp_path / "train", None)


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for train in ("train", "val"):
        for name, grey in (("n02", 200), ("n01", 100)):
            (tmp_path / train / name).mkdir(parents=True)
            Image.new("L", (50, 40), grey).save(tmp_path / train / name / "x.JPEG")  # some of ImageNet is grey
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no image")
    data = ImageNet(tmp_path, batch_size=2, loaders=0, size=24)
    ((images, labels),) = list(data.val_dataloader())
    assert images.shape == (2, 3, 24, 24)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 1]
    assert images.float().mean(dim=(1, 2, 3)).tolist() == pytest.approx([100, 200], abs=2)
    (tmp_path / "train" / "n01" / "x.JPEG").unlink()
    (tmp_path / "train" / "n02" / "x.JPEG").unlink()
    with pytest.raises(ValueError, match="has no images: one folder per class"):
        data.train_dataloader()


def test_every_image_is_validated_once_and_trained_on_once(tmp_path: Path) -> None:
    make_cifar100(tmp_path, count=52)  # 13 for validation: not a multiple of the workers
    seen: list[list[tuple[int, ...]]] = []
    for rank in range(3):
        data = shared(Cifar100(tmp_path, batch_size=4, loaders=0), rank, workers=3)
        seen.append([tuple(image.flatten().tolist()) for images, _ in data.val_dataloader() for image in images])
        assert len(data.train_dataloader()) == 52 // 3 // 4
    everything = [tuple(image.flatten().tolist()) for image, _ in Cifar(tmp_path / "test", None)]  # type: ignore[attr-defined]
    assert sorted(sum(seen, [])) == sorted(everything)


def test_augmented_images_are_shifted_parts_of_the_image() -> None:
    image = Image.fromarray(pixels(count=1)[0].transpose(1, 2, 0))
    torch.manual_seed(0)
    shifted = [to_tensor(augment_small(image, degrees=0)) for _ in range(40)]
    whole = nn.functional.pad(to_tensor(image), (4, 4, 4, 4))
    plain, mirrored = (
        {tuple(part[:, top : top + 32, left : left + 32].flatten().tolist()) for top in range(9) for left in range(9)}
        for part in (whole, whole.flip(2))
    )
    found = {tuple(part.flatten().tolist()) for part in shifted}
    assert found <= plain | mirrored
    assert len(found & plain) > 8
    assert len(found & mirrored) > 8
    turned = to_tensor(augment_small(image, padding=0, degrees=15))
    assert turned.shape == (3, 32, 32)
    assert not torch.equal(turned, to_tensor(image))


def test_crops_are_as_large_as_asked_and_centred() -> None:
    middle = (12, 4, 68, 60)  # 56 x 56 of 80 x 64: 7/8 of the shorter side
    for inside, outside in ((255, 0), (0, 255)):
        image = Image.new("RGB", (80, 64), (outside,) * 3)
        image.paste((inside,) * 3, middle)
        cropped = to_tensor(center_crop(image, 28))
        assert cropped.shape == (3, 28, 28)
        assert cropped[:, 1:-1, 1:-1].eq(inside).all()  # pixels at the edge are mixed with those beyond it
        assert cropped[:, 14, 0].float().sub(inside).abs().max() < 80
    torch.manual_seed(0)
    for size in ((500, 20), (20, 500), (30, 30)):
        assert random_crop(Image.new("RGB", size), 16).size == (16, 16)


def test_the_rate_warms_up_and_drops() -> None:
    def rate(step: int) -> float:
        return warmup_then_drops(step, 10, workers=8, warmup_epochs=5, milestones=(30, 60), gamma=0.1)

    assert [rate(step) for step in (0, 25, 50, 299, 300, 599, 600, 799)] == pytest.approx(
        [1 / 8, 1 / 8 + 7 / 16, 1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    linear = [warmup_then_linear(step, steps=20, warmup_steps=4) for step in (0, 2, 4, 12, 20, 21)]
    assert linear == pytest.approx([0, 0.5, 1, 0.5, 0, 0])
    assert warmup_then_linear(0, steps=20, warmup_steps=0) == 1


def test_the_classifier_needs_a_number_of_epochs() -> None:
    model = ImageClassifier(VGG(10, depths=(1,), widths=(4,), pooled=1, hidden=4), 10, **STATISTICS)
    model.trainer = Trainer(accelerator="cpu", max_steps=10, logger=False)
    with pytest.raises(ValueError, match="give --trainer.max_epochs, and no max_steps"):
        model._epochs()


def test_networks_keep_small_images_and_normalize() -> None:
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    network = ResNet(10, depths=(1, 1), widths=(16, 32), stem_width=8, small_images=True)
    assert network.net.resnet.embedder(images.float()).shape == (2, 8, 32, 32)
    assert ResNet(10, (1, 1), (16, 32), 8).net.resnet.embedder(images.float()).shape == (2, 8, 8, 8)
    model = ImageClassifier(network, 10, **STATISTICS).eval()
    torch.testing.assert_close(model(images), network((images.float() / 255 - 0.5) / 0.25))
    with pytest.raises(ValueError, match="one entry for each stage"):
        VGG(10, depths=(1, 1), widths=(8,))
