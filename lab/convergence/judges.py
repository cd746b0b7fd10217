"""What judges the default: tasks on which it was not chosen, other optimizers, other learning rates, rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lab.convergence.scheme import Scheme
from lab.tasks import JUDGES, TASKS, Task, parse_task
from lightning_safusion.sparsify.schedule import SuitedDensity

Configs = Sequence[tuple[Task, Scheme]]

DENSE = Scheme("dense")
#: ``SAFusionStrategy()``.
DEFAULT = Scheme("auto", memory="auto", wire="q4")
#: Densities at which the tasks judge, and those of long trainings only.
DENSITIES, SPARSER = (0.1, 0.05, 0.02, 0.01), (0.005, 0.002)
#: Steps of the trainings of several lengths.
LENGTHS = (400, 1200, 4000)
RATES = (0.5, 1.0, 2.0)
#: Optimizers that need more than 2 %, with what ``density=None`` takes, on tasks that did not choose it.
OWN_DENSITIES = (
    ("headers-transformer[optimizer=muon]", SuitedDensity.ESTIMATED),
    ("headers-transformer[optimizer=lion,lr=0.0005]", SuitedDensity.CAUTIOUS),
    ("headers-lstm", SuitedDensity.PLAIN),
)
#: Tasks that judge the first steps, with their schedules; and those that chose what happens there.
EARLY = ("noisy-groupnorm", "noisy-separable", "noisy-vit", "headers-transformer", "restoring-transformer")
EARLY_CHOOSERS = ("noisy-batchnorm", "noise-unet", "bytes-onecycle", "prose-clipped")
EARLY_LENGTHS, EARLY_RATES = (100, 200, 400, 1200), (0.5, 2.0, 3.0)
#: Optimizers, with learning rates that suit them, of the transformer over bytes.
OPTIMIZERS = (
    "optimizer=nadam",
    "optimizer=radam",
    "optimizer=rmsprop,lr=0.001",
    "optimizer=adagrad,lr=0.02",
    "optimizer=adafactor,lr=0.02",
    "optimizer=muon",
    "optimizer=lion,lr=0.0005",
    "optimizer=schedule-free,lr=0.005",
    "sam=0.05",
)
SHARDED_TASKS = (
    "bytes-transformer",
    "headers-transformer",
    "restoring-transformer",
    "names-recommender",
    "digits-vit",
)
SHARDED_DENSITIES = (0.05, SuitedDensity.WITH_MOMENTUM)
SHARDED_WORKERS = (2, 4, 8, 16)
#: What else a training may have.
OPTIONS = (
    "clip=1.0",
    "clip_value=0.01",
    "weight_decay=0.1",
    "accumulate=4,batch=8",
    "precision=bf16",
    "fused=True",
    "ema=0.98,schedule=constant",
    "swa=0.25,schedule=constant",
    "schedule=onecycle",
)


def _at(densities: Sequence[float]) -> list[Scheme]:
    return [DENSE, *(replace(DEFAULT, density=density) for density in densities)]


def judges() -> Configs:
    """Every judging task, and trainings of several lengths."""
    lengths = [parse_task(f"headers-transformer[steps={steps}]") for steps in LENGTHS[1:]]
    longest = [(lengths[-1], replace(DEFAULT, density=density)) for density in SPARSER]
    return [*((task, scheme) for task in (*JUDGES, *lengths) for scheme in _at(DENSITIES)), *longest]


def early(names: Sequence[str] = EARLY) -> Configs:
    """The default in trainings of several lengths, from a hundred steps on."""
    tasks = [parse_task(f"{name}[steps={steps}]") for steps in EARLY_LENGTHS for name in names]
    return [(task, scheme) for task in tasks for scheme in _at((SuitedDensity.WITH_MOMENTUM,))]


def early_rates() -> Configs:
    """The same tasks at other learning rates, after 100 and 400 steps."""
    short = [(task, scheme) for task, scheme in early() if task.steps in (EARLY_LENGTHS[0], EARLY_LENGTHS[2])]
    return [(task, replace(scheme, lr_scale=rate)) for task, scheme in short for rate in EARLY_RATES]


def optimizers() -> Configs:
    """Other optimizers, and other options of a training, on the transformer over bytes."""
    tasks = [parse_task(f"bytes-transformer[{changes}]") for changes in (*OPTIMIZERS, *OPTIONS)]
    return [(task, scheme) for task in tasks for scheme in _at(DENSITIES[:3])]


def own_densities() -> Configs:
    """Muon, Lion, and an LSTM with SGD."""
    tasks = [(parse_task(name), density) for name, density in OWN_DENSITIES]
    return [(task, scheme) for task, density in tasks for scheme in _at((density,))]


def rivals() -> Configs:
    """What sends few bytes in other ways, at several rates: DeMo and SparseLoCo at published densities, and at more."""
    schemes = [Scheme("bf16"), *(Scheme("powersgd", rank=rank) for rank in (1, 2, 4))]
    schemes += [Scheme("demo", density=density) for density in (32 / 64**2, 0.02)]
    schemes += [Scheme("sparseloco", density=density) for density in (64 / 64**2, 0.04)]
    schemes.append(Scheme("scape", density=0.02))
    task = TASKS["headers-transformer"]
    return [(task, replace(scheme, lr_scale=rate)) for scheme in schemes for rate in RATES]


def shards() -> Configs:
    """Shards beside a sparse all-gather, by number of workers."""

    def both(workers: int) -> list[Scheme]:
        gathered = [replace(DEFAULT, density=density, workers=workers) for density in SHARDED_DENSITIES]
        return [*gathered, *(replace(scheme, collective="sharded") for scheme in gathered)]

    return [(TASKS[name], scheme) for workers in SHARDED_WORKERS for name in SHARDED_TASKS for scheme in both(workers)]
