"""What is run: one factor at a time from a centre point, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from lab.convergence import judges
from lab.convergence.scheme import Scheme
from lab.convergence.training import Run
from lab.tasks import TASKS, Task
from lab.tasks.models import TwoHeads

#: What a scheme differs from another in.
Change = Mapping[str, Any]

DENSITIES = (0.05, 0.01, 0.002)
#: The rule of ``system="safusion"`` on small tensors.
SMALL = 512
DENSE = Scheme("dense")
#: The scopes, at the density of the centre point and with the same memory.
SCOPES = MappingProxyType(
    {
        "behind": Scheme("behind"),
        "ahead": Scheme("ahead"),
        "pooled": Scheme("pooled"),
        "pooled, 4 bits": Scheme("pooled", wire="q4"),
    }
)
#: The same with small tensors dense, as ``system="safusion"`` has them.
SMALL_DENSE = MappingProxyType(
    {f"{name}, small dense": replace(SCOPES[name], dense_below=SMALL) for name in ("ahead", "pooled")}
)
#: The scopes with four bits each.
FOUR_BITS = MappingProxyType(
    {f"{name}, 4 bits": replace(SCOPES[name], wire="q4") for name in ("behind", "ahead", "pooled")}
)
RANKS = (1, 4, 16)
POOLED, FEW_BITS = SCOPES["pooled"], SCOPES["pooled, 4 bits"]
#: ``SAFusionStrategy(select_by="gradient")``: the default, except with Adam and AdamW.
DEFAULT = replace(FEW_BITS, memory="auto")
CONTENDERS = MappingProxyType({**SCOPES, "the default": DEFAULT})
#: Densities of four bits per value beyond those of all contenders: the bytes of float32 values at a few per cent.
MORE_DENSITIES = (0.25, 0.1)
#: Other formats of few bits.
COARSER = ((0.5, "q2"), (0.25, "sign"))
_SLOWER, _FASTER = "ef21[momentum=0.9]", "ef21[momentum=0.8]"
#: A residual that is a momentum as well, in place of the optimizer's.
DECOUPLED: Change = MappingProxyType({"memory": "decoupled", "momentum": 0.0})
#: The same with other factors than the usual 0.9.
FACTORS: tuple[Change, ...] = tuple(
    MappingProxyType({**DECOUPLED, "memory": f"decoupled[momentum={momentum}]"}) for momentum in (0.95, 0.98, 0.99)
)
#: A residual that fades, with the optimizer's momentum as it is.
FADING: tuple[Change, ...] = tuple(
    MappingProxyType({"memory": memory})
    for memory in (*(f"residual[decay={decay}]" for decay in (0.8, 0.9, 0.95, 0.98, 0.99)), "clipped[factor=3.0]")
)
#: Momentum correction, in place of the optimizer's momentum.
CORRECTED: Change = MappingProxyType({"memory": "dgc", "momentum": 0.0})

VISION, PLAIN, HEADS, LANGUAGE = (
    TASKS[name] for name in ("digits-resnet", "digits-vgg", "digits-heads", "bytes-transformer")
)
#: Tasks on which every contender is run at every density.
MAIN = (VISION, PLAIN, HEADS, LANGUAGE, TASKS["bytes-lstm"])
#: Tensors in a buffer in observation 1; 0 puts all into one.
DEGREES = (1, 4, 16, 0)
#: Where observation 1 is looked for: a deep plain network, and so few elements that whole layers go without; a network
#: with a head of smaller weight in the loss.
OBSERVED = ((PLAIN, Scheme("behind", density=0.0005)), (HEADS, Scheme("behind")))
#: The second head's share of the loss, and the network with it.
WEIGHTS = MappingProxyType(
    {
        1.0: replace(HEADS, name=f"{HEADS.name}-1", model=partial(TwoHeads, 1.0)),
        0.1: HEADS,
        0.01: replace(HEADS, name=f"{HEADS.name}-0.01", model=partial(TwoHeads, 0.01)),
    }
)
#: What is compared there: selection from one buffer of all tensors, and from each tensor.
WEIGHED = (Scheme("behind", degree=0), Scheme("ahead"), Scheme("pooled"))

Configs = Sequence[tuple[Task, Scheme]]


def _scopes() -> Configs:
    """Every contender on every task at every density, and the references."""
    sparse = [replace(scheme, density=density) for density in DENSITIES for scheme in SCOPES.values()]
    sparse += [replace(FEW_BITS, density=density) for density in MORE_DENSITIES]
    ranks = [(task, Scheme("powersgd", rank=rank)) for rank in RANKS for task in MAIN if rank == 4 or task is LANGUAGE]
    return [*((task, scheme) for task in MAIN for scheme in (DENSE, *sparse)), *ranks]


def _swept(schemes: Iterable[Scheme]) -> Configs:
    """Contenders of one study, on every task at every density."""
    return [(task, replace(scheme, density=density)) for task in MAIN for density in DENSITIES for scheme in schemes]


def _defaults() -> Configs:
    """What the package does when it is given a density."""
    more = [(task, replace(DEFAULT, density=density)) for task in MAIN for density in MORE_DENSITIES]
    return [*_swept([DEFAULT]), *more]


def _observation_1() -> Configs:
    """Missing rate and accuracy by fusion degree, with and without error feedback; then by the scale of a head."""
    changes: list[Change] = [*({"degree": degree} for degree in DEGREES), {"method": "ahead"}]
    by_degree = [
        (task, replace(scheme, memory=memory, **change))
        for task, scheme in OBSERVED
        for memory in ("none", "residual")
        for change in changes
    ]
    by_weight = [
        (task, scheme)
        for task in WEIGHTS.values()
        for scheme in (DENSE, *(replace(each, memory=memory) for memory in ("none", "residual") for each in WEIGHED))
    ]
    return [(PLAIN, DENSE), *by_degree, *by_weight]


def _observation_2() -> Configs:
    """Selection after and before fusion without error feedback, on all tasks: what the papers' own scripts run."""
    return [(task, Scheme(method, memory="none")) for task in MAIN for method in ("behind", "ahead", "pooled")]


def _remedies() -> Configs:
    """What may help adaptive optimizers, one at a time, and SGD on the same network."""
    denser, sent = replace(POOLED, density=0.05), replace(FEW_BITS, density=0.05)
    adaptive = [
        replace(POOLED, beta2=0.95),
        replace(POOLED, memory="residual[decay=0.9]"),
        replace(POOLED, memory="clipped[factor=3.0]"),
        replace(POOLED, ramp=0.3),
        replace(POOLED, dense_start=0.1),
        replace(POOLED, dense_start=0.1, frozen=0.1),
        replace(SCOPES["ahead"], select_by="update"),
        replace(SCOPES["ahead"], compressor="adtopk"),  # the largest of every row: chunks of a tensor
        # momentum before the selection, in place of the optimizer's: momentum correction, and decoupled momentum
        replace(POOLED, **CORRECTED),
        *(replace(scheme, **memory) for scheme in (POOLED, denser) for memory in (DECOUPLED, *FACTORS)),
        *(replace(POOLED, **memory, dense_start=0.1) for memory in (CORRECTED, DECOUPLED)),
        # an element that is sent every hundredth step makes few steps: larger ones
        *(replace(scheme, **FACTORS[1], lr_scale=scale) for scheme in (POOLED, FEW_BITS) for scale in (2.0, 3.0, 5.0)),
        replace(POOLED, **FACTORS[2], lr_scale=3.0),
        replace(POOLED, **DECOUPLED, ramp=0.3),
        replace(SCOPES["ahead"], **DECOUPLED),
        replace(denser, **DECOUPLED, dense_start=0.1),
        *(replace(FEW_BITS, density=density, **DECOUPLED) for density in (*MORE_DENSITIES, 0.05, 0.01)),
        *(replace(FEW_BITS, density=density, **memory) for density in (0.25, 0.1, 0.05, 0.01) for memory in FACTORS),
        replace(denser, dense_start=0.1, beta2=0.95),
        # a dense estimate of the gradient, in place of bursts; it lags behind, so that a smaller step helps
        *(replace(denser, memory=memory, momentum=0.0, lr_scale=0.5) for memory in (_SLOWER, _FASTER)),
        # the same bytes in more entries of fewer bits
        *(replace(POOLED, density=density, wire=wire) for density, wire in COARSER),
        replace(FEW_BITS, density=0.2),
        replace(FEW_BITS, density=0.25, beta2=0.95),
        replace(denser, wire="bf16"),
        replace(sent, ramp=0.3),
        replace(sent, dense_start=0.1),
        # EF21 and its optimizer without compression
        *(Scheme("ahead", density=1.0, memory=_FASTER, momentum=0.0, lr_scale=scale) for scale in (0.5, 0.7)),
        replace(DENSE, momentum=0.8, lr_scale=0.7),
        # and decoupled momentum, of which nothing is left where everything is sent; with some tensors whole
        replace(DENSE, momentum=0.0),
        replace(FEW_BITS, density=0.1, dense_below=SMALL, **DECOUPLED),
        # both together
        *(
            replace(FEW_BITS, density=density, memory=_FASTER, momentum=0.0, lr_scale=scale)
            for density, scale in ((0.25, 0.5), (0.25, 0.7), (0.1, 0.5), (0.05, 0.5))
        ),
    ]
    plain = [DENSE, *SCOPES.values(), replace(FEW_BITS, density=0.25)]
    return [*((LANGUAGE, scheme) for scheme in adaptive), *((TASKS["bytes-transformer-sgd"], s) for s in plain)]


def _memories() -> Configs:
    """What may help SGD: momentum before the selection, with the optimizer's off, and a denser beginning."""
    sparse = [
        *(replace(scheme, **CORRECTED) for scheme in SCOPES.values()),
        *(replace(POOLED, **DECOUPLED, lr_scale=scale) for scale in (1.0, 5.0, 10.0)),
        *(replace(POOLED, **FACTORS[0], lr_scale=scale) for scale in (5.0, 10.0)),
        *(replace(FEW_BITS, **memory, lr_scale=10.0) for memory in (DECOUPLED, *FACTORS)),
        *(replace(FEW_BITS, density=0.1, **memory, lr_scale=10.0) for memory in (DECOUPLED, FACTORS[0])),
        *(replace(scheme, ramp=0.3) for scheme in (POOLED, FEW_BITS)),
        *(replace(scheme, dense_start=0.1) for scheme in (POOLED, FEW_BITS)),
        replace(POOLED, **CORRECTED, dense_start=0.1),
        *(replace(FEW_BITS, **memory) for memory in FADING),
    ]
    on_both = [(task, scheme) for task in (PLAIN, TASKS["bytes-lstm"]) for scheme in sparse]
    return [*on_both, *_on_vision(), *_on_heads()]


def _on_heads() -> Configs:
    """Decoupled momentum on another adaptive task."""
    at = [(0.1, DECOUPLED), *((density, memory) for density in MORE_DENSITIES for memory in FACTORS[:2])]
    at += [(0.05, FACTORS[0]), (0.05, FACTORS[1]), (0.01, FACTORS[1])]
    schemes = (*(replace(FEW_BITS, density=density, **memory) for density, memory in at), replace(DENSE, momentum=0.0))
    return [(HEADS, scheme) for scheme in schemes]


def _on_vision() -> Configs:
    corrected = [replace(scheme, **CORRECTED) for scheme in SCOPES.values()]
    decoupled = [replace(scheme, **DECOUPLED, lr_scale=10.0) for scheme in (POOLED, FEW_BITS)]
    return [(VISION, scheme) for scheme in (*corrected, *decoupled)]


def _workers() -> Configs:
    """More workers, who share the same batches."""
    schemes = (DENSE, *SCOPES.values())
    return [(VISION, replace(scheme, workers=workers)) for workers in (4, 8) for scheme in schemes]


def _length() -> Configs:
    """A training three times as long: whether what compression costs is made up for."""
    longer = replace(LANGUAGE, name=f"{LANGUAGE.name}-long", steps=3 * LANGUAGE.steps)
    references = (DENSE, replace(DENSE, momentum=0.0), Scheme("powersgd"))
    plain = (replace(FEW_BITS, density=density) for density in (0.25, 0.1, 0.05))
    at = ((0.1, DECOUPLED), (0.1, FACTORS[0]), (0.1, FACTORS[1]), (0.05, FACTORS[0]), (0.05, FACTORS[1]))
    remedies = (replace(FEW_BITS, density=density, **memory) for density, memory in at)
    estimate = replace(FEW_BITS, density=0.1, memory=_FASTER, momentum=0.0, lr_scale=0.5)
    defaults = (replace(DEFAULT, density=density) for density in (0.1, 0.05, 0.25))
    return [(longer, scheme) for scheme in (*references, *defaults, *plain, *remedies, estimate)]


#: Configurations by study, in the order in which they are run.
STUDIES = MappingProxyType(
    {
        "scopes": _scopes(),
        "defaults": _defaults(),
        "four-bits": _swept(FOUR_BITS.values()),
        "small-tensors": _swept(SMALL_DENSE.values()),
        "remedies": _remedies(),
        "memories": _memories(),
        "observation-1": _observation_1(),
        "observation-2": _observation_2(),
        "workers": _workers(),
        "length": _length(),
        "judges": judges.judges(),
        "early": judges.early(),
        "early-choosers": judges.early(judges.EARLY_CHOOSERS),
        "early-rates": judges.early_rates(),
        "optimizers": judges.optimizers(),
        "rivals": judges.rivals(),
        "own-densities": judges.own_densities(),
        "shards": judges.shards(),
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
