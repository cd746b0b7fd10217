"""Steps of the experiments by ``safusion bench``, in the papers' workloads: on GPUs, or on two workers here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from examples.workloads.cli import CONFIGS
from lab.bench.links import machines
from lab.bench.run import usable_rates
from lab.papers.claims import HERE, Condition, Experiment, Step
from lab.papers.workloads import WORKERS, files, is_first, prepare
from lab.turns import Figures, bench, figures_of
from lightning_safusion.systems import EngineSystem, resolve_system
from lightning_safusion.tools.bench.job import JobOptions
from lightning_safusion.tools.bench.run import run_own

#: Configurations of the experiments' models.
WORKLOADS = {
    "resnet-152": "resnet152_imagenet",
    "vit-large": "vit_large_imagenet",
    "gpt2-large": "gpt2_large_wikitext103",
    "bert-large": "bert_large_squad",
}
# Of links between workers of this machine.
_RATES, _SEVERAL = ("100mbit",), ("30mbit", "100mbit", "1gbit")
_ROUNDS, _MINUTES = 6, 2.0
_REMARK = (
    "Measured by `safusion bench`: every row trains a few steps from the same weights, in turns. These are times of a "
    "step, and say nothing of accuracy. In the median row half of the steps lie within {:.0%} of their median, up or "
    "down: differences that are not larger are noise."
)


def measure(
    experiment: Experiment, tiny: bool, bandwidth: Sequence[str], config: Sequence[str], logs: Path
) -> tuple[list[Step], str] | None:
    """Measures an experiment.

    Args:
        experiment: Which one.
        tiny: On two workers of this machine, in the tiny configurations; else on the workers of the launcher.
        bandwidth: Of the links with ``tiny``.
        config: Laid over the configuration of each workload.
        logs: Folder for what bench writes.

    Returns:
        Times, and what is to be known of them; None on all workers but the first.

    Raises:
        ValueError: If no launcher has started this process, and it is not tiny.
        RuntimeError: If a worker or a row fails.
    """
    prepare(tiny, logs)
    rates: Sequence[str | None] = [None]
    if tiny:
        given = bandwidth or (_SEVERAL if experiment.varies == "rate" else _RATES)
        rates = usable_rates(given, Console())
    steps, spreads = [], []
    for rate in rates:
        rows = [[row_of(name, each) for name in experiment.systems] for each in experiment.at([rate], WORKERS)]
        for model in experiment.models:
            options = JobOptions(
                [str(CONFIGS / "defaults.yaml"), *files(WORKLOADS[model], tiny, logs), *config],
                rounds=_ROUNDS,
                minutes=_MINUTES if tiny else JobOptions.minutes,
                warmup=20 if tiny else JobOptions.warmup,
                calibrate=False,
                output=str(logs / "-".join(filter(None, (model, rate)))),
            )
            figures, workers = _bench(options, list(chain(*rows)), tiny, rate)
            spreads += [(row["high_s"] - row["low_s"]) / (2 * row["step_s"]) for row in figures.values()]
            for condition, own in zip(experiment.at([rate], workers), rows, strict=True):
                known = [(name, figures[row]) for name, row in zip(experiment.systems, own, strict=True) if figures]
                steps += [
                    Step(model, condition.name, name, row["step_s"], row["select_s"] or 0.0, row["exposed_s"])
                    for name, row in known
                ]
    return (steps, _REMARK.format(median(spreads))) if steps else None


def row_of(system: str, condition: Condition) -> str:
    """A system as bench has it. What the papers select by thresholds takes the condition's compressor."""
    parts = resolve_system(system)
    if not isinstance(parts, EngineSystem):
        return system
    chosen = parts.compressor == "topk" and system != HERE
    options = [f"density={condition.density:g}", *[f"compressor={condition.compressor}"] * chosen]
    return f"{system}[{','.join(options)}]"


def _bench(options: JobOptions, rows: Sequence[str], tiny: bool, rate: str | None) -> tuple[Figures, int]:
    """The figures of all rows, none on workers but the first; and how many workers there are."""
    if tiny:
        with machines(WORKERS, rate) as place:
            return bench(place, partial(replace, options), rows, Path(options.output), Console()), WORKERS
    run_own(replace(options, systems=tuple(dict.fromkeys(rows))))
    return figures_of(Path(options.output)) if is_first() else {}, torch.distributed.get_world_size()
