"""Learning curves of a small LSTM on the text of Python's standard library: dense DDP, SAFusion, and a bigram model.

    $ python -m lab perplexity --output docs/images/perplexity.png

The papers' LSTM workload in its tiny configuration (letters, two workers on the CPU), through its own program, on more
text and for more epochs. Every scheme has the same start, batches and learning rates. Prints a markdown table and saves
a picture. A scheme that has been trained into ``--folder`` already is read from there.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from examples.workloads.cli import CONFIGS
from examples.workloads.language.bigram import bigram_perplexity
from examples.workloads.language.tokens import Vocabulary
from examples.workloads.language.wikitext import SPLITS
from examples.workloads.make_tiny_data import make_wikitext2
from lab.markdown import markdown

WORKLOAD = "lstm_wikitext2"
_OPTION = "--trainer.strategy.init_args"
SCHEMES = {
    "dense DDP": ["--config", str(CONFIGS / "dense.yaml")],
    "SAFusion, 5 %": [f"{_OPTION}.density=0.05"],
    "SAFusion, 1 %": [f"{_OPTION}.density=0.01"],
}


@dataclass(frozen=True)
class Curve:
    """What one training has logged.

    Args:
        steps: Training steps at which the loss was logged.
        losses: Of these steps, on the first worker.
        epochs: Training steps at which an epoch had ended.
        perplexities: Of the validation text after each epoch, per letter.
    """

    steps: list[int]
    losses: list[float]
    epochs: list[int]
    perplexities: list[float]


def train(folder: Path, options: list[str], text: Path, epochs: int) -> None:
    """Trains the workload on two workers, as a user would; leaves ``metrics.csv`` in ``folder``."""
    command = [sys.executable, "-m", "examples.workloads", "fit"]
    for name in (WORKLOAD, f"{WORKLOAD}_tiny"):
        command += ["--config", str(CONFIGS / f"{name}.yaml")]
    logger = [f"--trainer.logger.save_dir={folder.parent}", f"--trainer.logger.name={folder.name}"]
    command += [*options, "--trainer.logger=CSVLogger", *logger, "--trainer.logger.version="]
    command += [f"--data.init_args.folder={text}", f"--trainer.max_epochs={epochs}"]
    command += ["--trainer.callbacks=[]", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    # one thread each, or the workers fight for the cores
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def read(path: Path) -> Curve:
    """Reads Lightning's ``metrics.csv``."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    training = [row for row in rows if row.get("loss")]
    validation = [row for row in rows if row.get("val_perplexity")]
    return Curve(
        [int(row["step"]) + 1 for row in training],
        [float(row["loss"]) for row in training],
        [int(row["step"]) + 1 for row in validation],
        [float(row["val_perplexity"]) for row in validation],
    )


def bigram(text: Path) -> float:
    """The bigram model's perplexity on the validation text."""
    with (CONFIGS / f"{WORKLOAD}_tiny.yaml").open() as file:
        size: int = yaml.safe_load(file)["data"]["init_args"]["vocabulary_size"]
    vocabulary = Vocabulary(text / SPLITS["train"], size)
    train, held_out = (vocabulary.encode(text / SPLITS[split]) for split in ("train", "validation"))
    return bigram_perplexity(train, held_out, size)


def table(curves: dict[str, Curve], reference: float) -> str:
    """A row for each scheme, a column for each epoch."""
    epochs = range(1, 1 + max(len(curve.perplexities) for curve in curves.values()))
    rows = [(name, *(f"{value:.2f}" for value in curve.perplexities)) for name, curve in curves.items()]
    return f"{markdown(('epoch', *epochs), rows)}\n\nBigram model: {reference:.2f}"


def picture(curves: dict[str, Curve], reference: float, title: str) -> Figure:
    """Loss of every logged step (left) and perplexity after every epoch (right)."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for name, curve in curves.items():
        left.plot(curve.steps, curve.losses, linewidth=1, alpha=0.8, label=name)
        right.plot(curve.epochs, curve.perplexities, "o-", label=name)
    right.axhline(reference, color="black", linestyle=":", label="bigram model")
    left.set(xlabel="step", ylabel="training loss of the first worker, nats per letter")
    right.set(xlabel="step", ylabel="perplexity per letter of the validation text")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def perplexity(
    characters: int = 300_000,
    epochs: int = 8,
    folder: Path = Path("runs/perplexity"),
    output: Path = Path("perplexity.png"),
) -> None:
    """Learning curves of a small LSTM on the text of Python's standard library: DDP, SAFusion, and a bigram model.

    Args:
        characters: Letters of the training text.
        epochs: Of each training.
        folder: Of the text and the trainings; what has been trained is read from there.
        output: Picture.
    """
    text = folder / f"text-{characters}"
    if not text.exists():
        make_wikitext2(text, characters)
    curves = {}
    for name, options in SCHEMES.items():
        run = folder / f"{name} {characters} {epochs}"
        if not (run / "metrics.csv").exists() or len(read(run / "metrics.csv").perplexities) < epochs:
            train(run, options, text, epochs)
        curves[name] = read(run / "metrics.csv")
    reference = bigram(text)
    title = f"An LSTM on {characters:,} letters of Python's standard library, 2 workers"
    print(f"{title}\n\n{table(curves, reference)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    picture(curves, reference, title).savefig(output, dpi=100)
