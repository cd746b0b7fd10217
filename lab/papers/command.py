"""``python -m lab papers``: an experiment of SAFusion's slides by one command, beside what the slides claim.

    $ python -m lab papers --experiment 3                      # simulated, on the papers' cluster
    $ python -m lab papers --experiment 3 --tiny --measured    # by safusion bench, on two workers of this machine
    $ python -m lab papers --experiment 1 --tiny               # trains the tiny workloads

Each writes its table, picture and raw figures into a folder, and says whether the claim is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.papers.claims import EXPERIMENTS, Experiment, Step
from lab.papers.figures import write
from lab.papers.simulated import simulate
from lab.svg import chart
from lightning_safusion.lookup import need
from lightning_safusion.tools.plan.cluster import resolve_link

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """What an experiment ends in.

    Args:
        title: What was done, and where.
        claim: What the slides claim.
        table: In markdown.
        sentences: Whether the claim is reached, and what to know of the figures.
        size: Of their picture, width and height in inches.
        draw: Draws it.
        figures: All of them.
    """

    title: str
    claim: str
    table: str
    sentences: Sequence[str]
    size: tuple[float, float]
    draw: Callable[[Figure], None]
    figures: Sequence[DataclassInstance]

    def save(self, path: Path) -> str:
        """Writes ``.md``, ``.svg`` and ``.csv`` beside each other, and returns what the first one says."""
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = (
            f"### {self.title}",
            f"Claimed: {self.claim}.",
            self.table,
            "\n".join(f"- {sentence}" for sentence in self.sentences),
        )
        text = "\n\n".join(parts)
        Path(f"{path}.md").write_text(f"{text}\n", encoding="utf-8")
        with chart(Path(f"{path}.svg"), self.size, self.title, " ".join(self.sentences)) as figure:
            figure.suptitle(self.title, fontsize="medium")
            self.draw(figure)
        write(Path(f"{path}.csv"), self.figures)
        return text


def papers(
    experiment: Sequence[int] = tuple(EXPERIMENTS),
    tiny: bool = False,
    measured: bool = False,
    bandwidth: Sequence[str] = (),
    config: Sequence[str] = (),
    output: Path = Path("safusion_papers"),
) -> None:
    """An experiment of SAFusion's slides by one command, beside what the slides claim.

    Experiment 1 trains four tasks with five systems: accuracy over steps and time. The others compare times of a step:
    2 throughput, 3 ablation, 4 breakdown, 5 sparsifiers, 6 densities, 7 bandwidths. They are simulated; with measured
    they are what "safusion bench" measures. What trains at full size needs GPUs, and is started on every worker by srun
    or torchrun.

    Args:
        experiment: Its number, from 1 to 7; several are separated by commas.
        tiny: What two processor cores do in minutes: the workloads' tiny configurations on two workers of this machine,
            joined by links of the bandwidth where that is allowed (Linux, root). Of experiments 2 to 7 the first model
            only, simulated too.
        measured: Measure experiments 2 to 7 in place of simulating them.
        bandwidth: Of the links, such as 10gbit, separated by commas; the slides' where they are simulated, 100mbit
            where workers of this machine train.
        config: Files of LightningCLI that are laid over those of every workload, such as devices and num_nodes.
        output: Folder of table, picture and raw figures.

    Raises:
        ValueError: If there is no such experiment or link, or an option makes no sense there.
        ModuleNotFoundError: If an extra is missing; names it.
        RuntimeError: If a worker fails; names its log.
    """
    need("matplotlib")
    for number in experiment:
        _check(number, tiny, measured, bandwidth, config)
    for number in experiment:
        name = f"experiment-{number}" + "-tiny" * tiny + "-measured" * measured
        kind = _trained if number == 1 else _measured if measured else _simulated
        report = kind(number, tiny, bandwidth, config, output / name)
        if report is not None:
            print(f"\n{report.save(output / name)}\n\nwritten to {output}: {name}.md, .svg, .csv", flush=True)


def _check(experiment: int, tiny: bool, measured: bool, bandwidth: Sequence[str], config: Sequence[str]) -> None:
    if experiment not in (1, *EXPERIMENTS):
        raise ValueError(f"there is no experiment {experiment}: give 1 to {max(EXPERIMENTS)}")
    if experiment == 1 and measured:
        raise ValueError("experiment 1 always trains: leave out --measured")
    if experiment == 1 and len(bandwidth) > 1:
        raise ValueError(f"experiment 1 trains over links of one bandwidth, got {', '.join(bandwidth)}")
    trains = experiment == 1 or measured
    if config and not trains:
        raise ValueError("--config is of trainings: give --measured, or leave it out")
    if bandwidth and trains and not tiny:
        raise ValueError(
            "--bandwidth is of simulated links and of those of --tiny; GPUs have the network that is there"
        )
    for rate in bandwidth:
        resolve_link(rate)


def _trained(number: int, tiny: bool, bandwidth: Sequence[str], config: Sequence[str], logs: Path) -> Report | None:
    from lab.papers import convergence, curves  # needs the extra "examples"

    found = convergence.train(tiny, bandwidth, config, logs)
    if found is None:  # on all workers but the first
        return None
    points, where = found
    title = f"Convergence ({'tiny workloads, ' if tiny else ''}{where})"
    draw = partial(curves.draw, points)
    return Report(title, convergence.CLAIM, curves.table(points), curves.sentences(points), curves.SIZE, draw, points)


def _measured(number: int, tiny: bool, bandwidth: Sequence[str], config: Sequence[str], logs: Path) -> Report | None:
    from lab.papers.measured import measure  # needs the extra "examples"

    experiment = _chosen(number, tiny)
    found = measure(experiment, tiny, bandwidth, config, logs)
    if found is None:
        return None
    steps, remark = found
    return _compared(experiment, steps, f"{experiment.title} (measured{', tiny workloads' * tiny})", [remark])


def _simulated(number: int, tiny: bool, bandwidth: Sequence[str], *_: object) -> Report:
    experiment = _chosen(number, tiny)
    steps = [
        simulate(model, condition, system)
        for model in experiment.models
        for condition in (experiment.at(bandwidth) if bandwidth else experiment.conditions)
        for system in experiment.systems
    ]
    return _compared(experiment, steps, f"{experiment.title} (simulated)", [])


def _chosen(number: int, tiny: bool) -> Experiment:
    experiment = EXPERIMENTS[number]
    return replace(experiment, models=experiment.models[:1]) if tiny else experiment


def _compared(experiment: Experiment, steps: Sequence[Step], title: str, remarks: Sequence[str]) -> Report:
    from lab.papers.report import draw, sentences, size, table

    shown = [*sentences(experiment, steps), *remarks]
    drawn = size(experiment, steps), partial(draw, experiment, steps)
    return Report(title, experiment.claim, table(experiment, steps), shown, *drawn, steps)
