"""Learning curves of a small LSTM on the text of Python's standard library: dense DDP, SAFusion, and a bigram model.

    $ python -m benchmarks.perplexity --output docs/images/perplexity.png

The papers' LSTM workload in its tiny configuration (letters, two workers on the CPU), through its own program, on more
text and for more epochs. Every scheme has the same start, batches and learning rates. Prints a markdown table and saves
a picture. A scheme that has been trained into ``--folder`` already is read from there.
"""

from __future__ import annotations

import argparse
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


def markdown(curves: dict[str, Curve], reference: float) -> str:
    """A row for each scheme, a column for each epoch."""
    epochs = range(1, 1 + max(len(curve.perplexities) for curve in curves.values()))
    lines = [f"| epoch | {' | '.join(map(str, epochs))} |", "| --- |" + " ---: |" * len(epochs)]
    lines += [f"| {name} | {' | '.join(f'{p:.2f}' for p in curve.perplexities)} |" for name, curve in curves.items()]
    return "\n".join([*lines, "", f"Bigram model: {reference:.2f}"])


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


def main() -> None:
    """Trains what has not been trained yet, prints the table, saves the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=300_000, help="letters of the training text")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/perplexity"), help="of the text and the trainings")
    parser.add_argument("--output", type=Path, default=Path("perplexity.png"))
    args = parser.parse_args()
    text = args.folder / f"text-{args.characters}"
    if not text.exists():
        make_wikitext2(text, args.characters)
    curves = {}
    for name, options in SCHEMES.items():
        folder = args.folder / f"{name} {args.characters} {args.epochs}"
        if not (folder / "metrics.csv").exists() or len(read(folder / "metrics.csv").perplexities) < args.epochs:
            train(folder, options, text, args.epochs)
        curves[name] = read(folder / "metrics.csv")
    reference = bigram(text)
    title = f"An LSTM on {args.characters:,} letters of Python's standard library, 2 workers"
    print(f"{title}\n\n{markdown(curves, reference)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    picture(curves, reference, title).savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
