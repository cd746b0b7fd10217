"""Makes small data sets in the formats of the real ones, for the ``*_tiny.yaml`` configurations.

python -m examples.workloads.make_tiny_data                  # all of them, in data/tiny
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import re
import sysconfig
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import ByteLevelBPETokenizer

from examples.workloads.language import raw_wikitext
from examples.workloads.language.tokens import UNKNOWN
from examples.workloads.language.wikitext import SPLITS
from examples.workloads.squad import data as squad
from examples.workloads.vision.cifar import FILES
from examples.workloads.vision.imagenet import FOLDERS

#: Where the configurations look for them.
FOLDER = Path("data/tiny")
_BLANK = "\N{OPEN BOX}"  # a letter of its own: WikiText's tokens are separated by blanks
_PAGE = 2000  # characters


def standard_library(characters: int) -> dict[str, str]:
    """Text that every machine has: modules of Python's standard library, one after another.

    Args:
        characters: Length of the training text; the others have a tenth of it.

    Returns:
        Texts for training, validation and testing. Of every twelve pages in a row the last two are held out: whole
        modules would be a language of their own.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    text = "".join(module.read_text(encoding="utf-8") for module in modules)
    splits = {"train": "", "validation": "", "test": ""}
    for page in range(characters * 12 // 10 // _PAGE):
        split = {10: "validation", 11: "test"}.get(page % 12, "train")
        splits[split] += text[page * _PAGE : (page + 1) * _PAGE]
    return splits


def make_wikitext2(folder: Path, characters: int = 200_000) -> None:
    """Writes ``wiki.*.tokens`` of letters: a language that a small LSTM learns in seconds.

    Args:
        folder: Is made if it is not there.
        characters: Length of the training text; the others have a tenth of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in standard_library(characters).items():
        letters = [_BLANK if letter == " " else letter if letter.isascii() else UNKNOWN for letter in text]
        (folder / SPLITS[split]).write_text(" ".join(letters), encoding="utf-8")


def make_wikitext103(folder: Path, characters: int = 200_000, vocabulary: int = 400) -> None:
    """Writes ``wiki.*.raw`` of Python sources, and ``vocab.json`` and ``merges.txt`` of byte pairs learnt from them.

    Args:
        folder: Is made if it is not there.
        characters: Length of the training text; the others have a tenth of it.
        vocabulary: Number of byte pairs, the 256 single bytes among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in standard_library(characters).items():
        (folder / raw_wikitext.SPLITS[split]).write_text(text, encoding="utf-8")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(folder / raw_wikitext.SPLITS["train"])], vocabulary, show_progress=False)
    tokenizer.save_model(str(folder))


def striped_images(count: int, classes: int, size: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Noisy images with stripes whose width and colour tell the class.

    Args:
        count: Number of images.
        classes: Number of classes, in turn.
        size: Height and width in pixels.
        seed: Of noise and positions.

    Returns:
        The images, uint8 [count, size, size, 3], and their classes.
    """
    generator = np.random.default_rng(seed)
    labels = [number % classes for number in range(count)]
    rows = np.arange(size)[None, :] + generator.integers(size, size=(count, 1))
    stripes = np.sin(rows / (1 + np.array(labels)[:, None] % 4))  # [count, size]
    colours = np.array([[label >> bit & 1 for bit in range(3)] for label in labels]) - 0.5  # [count, 3]
    clean = stripes[:, :, None, None] * colours[:, None, None, :]
    noisy = 128 + 60 * clean + generator.normal(scale=20, size=(count, size, size, 3))
    return noisy.clip(0, 255).astype(np.uint8), labels


def make_cifar100(folder: Path, count: int = 1280) -> None:
    """Writes ``train`` and ``test`` with eight of the 100 classes.

    Args:
        folder: Is made if it is not there.
        count: Training images; a quarter as many for testing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for train, name in FILES.items():
        images, labels = striped_images(count if train else count // 4, classes=8, size=32, seed=int(train))
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        content = {b"data": rows, b"fine_labels": labels, b"coarse_labels": [0] * len(labels)}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def make_imagenet(folder: Path, count: int = 1280) -> None:
    """Writes ``train`` and ``val`` with eight folders of JPEG files.

    Args:
        folder: Is made if it is not there.
        count: Training images; a quarter as many for validation.
    """
    for train, name in FOLDERS.items():
        images, labels = striped_images(count if train else count // 4, classes=8, size=40, seed=int(train))
        for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / name / f"n{label:08d}" / f"n{label:08d}_{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=95)


_FACTS = {
    "colour": ("red", "green", "blue", "grey", "black", "white"),
    "animal": ("cat", "dog", "horse", "bird", "sheep", "mouse"),
    "town": ("bonn", "graz", "bern", "lyon", "pisa", "cork"),
}
_FILLERS = ("It is old.", "Nobody knows why.", "They say so.", "It was found there.", "Some have seen it.")


def make_squad(folder: Path, count: int = 320) -> None:
    """Writes ``train-v1.1.json``, ``dev-v1.1.json`` and ``vocab.txt``: short texts, and the colour in each.

    Args:
        folder: Is made if it is not there.
        count: Training questions; a tenth as many for validation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(0)  # noqa: S311 - made-up data, no secret
    words: set[str] = set()
    for split, name in squad.FILES.items():
        paragraphs = []
        for number in range(count if split == "train" else count // 10):
            facts = {kind: choose.choice(names) for kind, names in _FACTS.items()}
            sentences = [f"The {kind} is {fact}." for kind, fact in facts.items()] + choose.choices(_FILLERS, k=6)
            choose.shuffle(sentences)
            context, question = " ".join(sentences), "What colour is it?"
            words |= set(re.findall(r"\w+|[.?]", f"{context} {question}".lower()))
            answer = {"text": facts["colour"], "answer_start": context.index(f"{facts['colour']}.")}
            entry = {"id": f"{split}-{number}", "question": question, "answers": [answer]}
            paragraphs.append({"context": context, "qas": [entry]})
        content = {"version": "1.1", "data": [{"title": "Facts", "paragraphs": paragraphs}]}
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *sorted(words)]), encoding="utf-8")


def make_all(folder: Path = FOLDER) -> None:
    """Makes all data sets.

    Args:
        folder: Is made if it is not there.
    """
    make_wikitext2(folder / "wikitext-2")
    make_wikitext103(folder / "wikitext-103-raw")
    make_cifar100(folder / "cifar-100-python")
    make_imagenet(folder / "imagenet")
    make_squad(folder / "squad")


def main() -> None:
    """Makes all data sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    make_all(folder)
    print(f"made small data sets in {folder}")


if __name__ == "__main__":
    main()
