"""What is run: one factor at a time from a centre point, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmarks.convergence.scheme import Scheme
from benchmarks.convergence.store import Run
from lightning_safusion.tasks import TASKS, Task

DENSITIES = (0.05, 0.01, 0.002)
#: The rule of ``system="safusion"`` on small tensors.
SMALL = 512
DENSE = Scheme("dense")
#: The contenders, at the density of the centre point.
SCOPES = MappingProxyType(
    {
        "behind": Scheme("behind"),
        "ahead": Scheme("ahead"),
        "ahead, small dense": Scheme("ahead", dense_below=SMALL),
        "pooled, small dense": Scheme("pooled", dense_below=SMALL),
    }
)
RANKS = (1, 4, 16)
#: Densities and wire formats of about a fifteenth to a hundredth of the bytes of float32.
FEW_BITS = ((0.5, "q2"), (0.25, "q4"), (0.25, "sign"), (0.1, "q4"), (0.05, "q4"), (0.02, "q4"))
_SLOWER, _FASTER = "ef21:momentum=0.9", "ef21:momentum=0.8"
DEGREES = (1, 2, 4, 8, 16, 0)
#: Learning rate of observation 1, as a factor: where training without error feedback suffers.
OBSERVED_LR = 5.0

VISION, LANGUAGE = TASKS["digits-resnet"], TASKS["bytes-transformer"]
#: Tasks on which every scope is run at every density.
MAIN = tuple(TASKS[name] for name in ("digits-resnet", "digits-vgg", "bytes-transformer", "bytes-lstm"))

Configs = Sequence[tuple[Task, Scheme]]


def _scopes() -> Configs:
    """Every contender on every task at every density, and the references."""
    sparse = [replace(scheme, density=density) for density in DENSITIES for scheme in SCOPES.values()]
    ranks = [(task, Scheme("powersgd", rank=rank)) for rank in RANKS for task in MAIN if rank == 4 or task is LANGUAGE]
    return [*((task, scheme) for task in MAIN for scheme in (DENSE, *sparse)), *ranks]


def _observation_1() -> Configs:
    """Missing rate and accuracy by fusion degree, with and without error feedback."""
    schemes = [replace(DENSE, lr_scale=OBSERVED_LR)]
    for memory in ("residual", "none"):
        behind = [Scheme("behind", degree=degree) for degree in DEGREES]
        schemes += [replace(each, memory=memory, lr_scale=OBSERVED_LR) for each in (*behind, Scheme("ahead"))]
    return [(VISION, scheme) for scheme in schemes]


def _observation_2() -> Configs:
    """Behind and ahead without error feedback, on all tasks: what the papers' own scripts run."""
    return [(task, Scheme(method, memory="none")) for task in MAIN for method in ("behind", "ahead", "pooled")]


def _remedies() -> Configs:
    """What may help adaptive optimizers, one at a time, and SGD on the same network."""
    pooled = SCOPES["pooled, small dense"]
    adaptive = [
        replace(pooled, beta2=0.95),
        replace(pooled, memory="residual:decay=0.9"),
        replace(pooled, ramp=0.3),
        replace(pooled, dense_start=0.1),
        replace(pooled, dense_start=0.1, frozen=0.1),
        replace(pooled, compressor="preconditioned"),
        replace(SCOPES["ahead, small dense"], compressor="adtopk"),  # the largest of every row: chunks of a tensor
        replace(pooled, density=0.05, dense_start=0.1, beta2=0.95),
        # a dense estimate of the gradient, in place of bursts; it lags behind, so that a smaller step helps
        *(replace(pooled, density=0.05, memory=memory, momentum=0.0, lr_scale=0.5) for memory in (_SLOWER, _FASTER)),
        replace(pooled, density=0.05, memory="ef21:momentum=0.6", momentum=0.0, lr_scale=0.7),
        # the same bytes in more entries of fewer bits
        *(replace(pooled, density=density, wire=wire) for density, wire in FEW_BITS),
        replace(pooled, density=0.25, wire="q4", beta2=0.95),
        replace(pooled, density=0.05, wire="bf16"),
        # what EF21 makes of the optimizer, without compression
        *(Scheme("ahead", density=1.0, memory=_FASTER, momentum=0.0, lr_scale=scale) for scale in (0.5, 0.7)),
        replace(DENSE, momentum=0.8, lr_scale=0.7),
        # both together
        *(
            replace(pooled, density=density, wire="q4", memory=_FASTER, momentum=0.0, lr_scale=scale)
            for density, scale in ((0.25, 0.5), (0.25, 0.7), (0.1, 0.5), (0.05, 0.5))
        ),
    ]
    plain = [DENSE, *SCOPES.values(), replace(pooled, density=0.25, wire="q4")]
    return [*((LANGUAGE, scheme) for scheme in adaptive), *((TASKS["bytes-transformer-sgd"], s) for s in plain)]


def _memories() -> Configs:
    """Error feedback, momentum correction (with the optimizer's momentum off) and wire precision under SGD."""
    scopes = [SCOPES[name] for name in ("behind", "ahead, small dense", "pooled, small dense")]
    corrected = [replace(scope, memory="dgc", momentum=0.0) for scope in scopes]
    schemes = [*corrected, *(replace(scope, wire="bf16") for scope in scopes)]
    return [(VISION, scheme) for scheme in schemes]


def _workers() -> Configs:
    """More workers, who share the same batches."""
    schemes = (DENSE, *SCOPES.values())
    return [(VISION, replace(scheme, workers=workers)) for workers in (4, 8) for scheme in schemes]


#: Configurations by study, in the order in which they are run.
STUDIES = MappingProxyType(
    {
        "scopes": _scopes(),
        "remedies": _remedies(),
        "memories": _memories(),
        "observation-1": _observation_1(),
        "observation-2": _observation_2(),
        "workers": _workers(),
    }
)


def full(seeds: Sequence[int]) -> list[Run]:
    """All studies; seed by seed, so that a part of it is a picture of the whole."""
    configs = dict.fromkeys(config for study in STUDIES.values() for config in study)
    return [Run(task, scheme, seed) for seed in seeds for task, scheme in configs]


def short(seeds: Sequence[int]) -> list[Run]:
    """A few steps of a few configurations: whether everything works."""
    tasks = replace(VISION, steps=21), replace(LANGUAGE, steps=20, batch=4)
    schemes = (DENSE, Scheme("powersgd"), *SCOPES.values(), Scheme("behind", memory="none"))
    return [Run(task, scheme, seed) for seed in seeds[:1] for task in tasks for scheme in schemes]


PRESETS = MappingProxyType({"full": full, "short": short})
