"""What the slides of SAFusion (HPDC 2025) claim, as figures: experiments 2 to 7 compare times of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

RIVALS = ("wfbp", "oktopk", "omgs", "cupcake")
#: SAFusion with the papers' buffer rule; this package's form of it; and the dense baseline, which the slides leave out.
PAPERS, HERE, DENSE = "safusion-paper", "safusion", "ddp-bf16"


@dataclass(frozen=True)
class Step:
    """What a step of one system takes; times in seconds.

    Args:
        model: As the slides name it.
        condition: Name of the condition.
        system: Its name.
        seconds: The whole step.
        select: Selection.
        exposed: Exchange that is not hidden behind the computation (the slides' NOCT).
    """

    model: str
    condition: str
    system: str
    seconds: float
    select: float
    exposed: float


@dataclass(frozen=True)
class Condition:
    """Under what systems are compared.

    Args:
        label: What differs from other conditions of the experiment, apart from the rate.
        rate: Of a node's network card; None for a network that is there, or the loopback.
        nodes: Of the simulated cluster.
        per_node: GPUs in each.
        density: Share of the elements that is sent.
        compressor: That selects them.
    """

    label: str = ""
    rate: str | None = "100gbit"
    nodes: int = 8
    per_node: int = 1
    density: float = 0.01
    compressor: str = "dgc"

    @property
    def name(self) -> str:
        """Both in a few words."""
        return ", ".join(filter(None, (self.label, self.rate or "this network")))


@dataclass(frozen=True)
class Claim:
    """By how many per cent a figure of some systems is above that of others.

    Args:
        figure: "seconds", "select" or "exposed" of :class:`Step`.
        pairs: The system whose figure is larger, and the one that it is compared with.
        ranges: From the least to the largest figure that is claimed: of a model, of conditions whose names begin so, or
            of all (""). Empty where the slides claim nothing.
        at_most: The claim is that the figure is not above the range, not that it reaches it.
    """

    figure: str
    pairs: tuple[tuple[str, str], ...]
    ranges: Mapping[str, tuple[float, float]]
    at_most: bool = False

    def range(self, model: str, condition: str) -> tuple[float, float] | None:
        """What is claimed there; None where nothing is."""
        if model in self.ranges:
            return self.ranges[model]
        return next((each for key, each in self.ranges.items() if condition.startswith(key)), None)

    def gain(self, pair: tuple[str, str], steps: Mapping[str, Step]) -> float:
        """Per cent by which the first system's figure is above the second's; NaN where one was not measured."""
        more, less = (float(getattr(steps[name], self.figure)) if name in steps else math.nan for name in pair)
        return 100 * (more / less - 1) if less > 0 else math.nan

    def reached(self, gain: float, claimed: tuple[float, float]) -> bool:
        """Whether a figure is as good as what is claimed at least."""
        return gain <= claimed[1] if self.at_most else gain >= claimed[0]


@dataclass(frozen=True)
class Experiment:
    """One of the experiments 2 to 7.

    Args:
        title: What is varied.
        claim: In words.
        models: By the names of their traces.
        claims: In figures.
        conditions: Of the slides.
        varies: What its conditions differ in.
    """

    title: str
    claim: str
    models: tuple[str, ...]
    claims: tuple[Claim, ...]
    conditions: tuple[Condition, ...]
    varies: Literal["nothing", "workers", "rows", "rate"] = "nothing"

    @property
    def systems(self) -> list[str]:
        """All that are compared."""
        return list(dict.fromkeys(name for claim in self.claims for pair in claim.pairs for name in pair))

    def at(self, rates: Sequence[str | None], workers: int | None = None) -> list[Condition]:
        """The conditions over links of other rates; None: whatever network there is.

        Args:
            rates: Of the links.
            workers: On which they are measured; None where they are simulated.
        """
        own: Sequence[Condition] = (Condition(),) if self.varies == "rate" else self.conditions
        if self.varies == "workers" and workers is not None:
            own = (Condition(f"{workers} workers"),)
        return [replace(each, rate=rate) for rate in rates for each in own]


def _faster(ranges: Mapping[str, tuple[float, float]]) -> tuple[Claim, ...]:
    """SAFusion against its rivals, as claimed, and DDP in bf16 against SAFusion."""
    over = Claim("seconds", tuple((rival, PAPERS) for rival in RIVALS), ranges)
    return over, Claim("seconds", ((DENSE, PAPERS), (DENSE, HERE)), {})


_VISION, _LANGUAGE = ("resnet-152", "vit-large"), ("gpt2-large", "bert-large")
_FOUR, _TWO = (*_VISION, *_LANGUAGE), ("resnet-152", "bert-large")
_LOCAL = (Condition(),)
_INTER = dict(zip(_FOUR, (12.4, 18.2, 30.8, 16.8), strict=True))
_INTRA = dict(zip(_FOUR, (34.7, 46.4, 35.3, 37.7), strict=True))
_OTHERS = tuple((rival, PAPERS) for rival in RIVALS[1:])

#: Experiments by number; experiment 1 trains (:mod:`lab.papers.convergence`).
EXPERIMENTS = {
    2: Experiment(
        "Throughput by cluster size",
        "+18 to +104 % over other systems (images), +20 to +144 % (language), on 200 Gbit/s",
        _FOUR,
        _faster(dict.fromkeys(_VISION, (18, 104)) | dict.fromkeys(_LANGUAGE, (20, 144))),
        tuple(Condition(f"{4 * nodes} GPUs", "200gbit", nodes, 4) for nodes in (4, 8, 16)),
        "workers",
    ),
    3: Experiment(
        "Ablation: aligned buffers, then adaptive ones",
        "aligned over naive up to +12.4, +18.2, +30.8, +16.8 %; adaptive over aligned up to +34.7, +46.4, +35.3, "
        "+37.7 % (ResNet-152, ViT-large, GPT2-large, BERT-large)",
        _FOUR,
        (
            Claim("seconds", (("saf-naive", "saf-inter"),), {model: (gain, gain) for model, gain in _INTER.items()}),
            Claim("seconds", (("saf-inter", PAPERS),), {model: (gain, gain) for model, gain in _INTRA.items()}),
            Claim("seconds", (("saf-inter", HERE),), {}),
        ),
        _LOCAL,
    ),
    4: Experiment(
        "Breakdown of a step",
        "exposed exchange: WFBP 132 to 160 % above SAFusion, the others 20 to 107 %; selection only 4.5 to 6.2 % above "
        "that of OMGS and Cupcake",
        _TWO,
        (
            Claim("exposed", (("wfbp", PAPERS),), {"": (132, 160)}),
            Claim("exposed", _OTHERS, {"": (20, 107)}),
            Claim("select", ((PAPERS, "omgs"), (PAPERS, "cupcake")), {"": (4.5, 6.2)}, at_most=True),
            Claim("exposed", ((HERE, PAPERS),), {}),
        ),
        _LOCAL,
    ),
    5: Experiment(
        "Sparsifiers",
        "+14 to +77 % (ResNet-152) and +10.2 to +90.6 % (BERT-large) over other systems, whatever selects",
        _TWO,
        _faster({"resnet-152": (14, 77), "bert-large": (10.2, 90.6)}),
        tuple(Condition(name, compressor=name) for name in ("dgc", "gaussiank", "redsync", "sidco")),
        "rows",
    ),
    6: Experiment(
        "Densities",
        "+27.7 to +78.6 % at 10 %, +26.2 to +83.1 % at 5 %, +14.2 to +77.2 % at 1 % over other systems",
        _TWO,
        _faster({"density 0.1": (27.7, 78.6), "density 0.05": (26.2, 83.1), "density 0.01": (14.2, 77.2)}),
        tuple(Condition(f"density {share:g}", density=share) for share in (0.1, 0.05, 0.01)),
        "rows",
    ),
    7: Experiment(
        "Bandwidths",
        "+12.1 to +85.9 %, +9.2 to +75.3 % and +11.2 to +77.2 % on three networks that the slides' text does not name",
        _TWO,
        _faster({"": (9.2, 85.9)}),
        tuple(Condition(rate=rate) for rate in ("1gbit", "10gbit", "25gbit", "100gbit")),
        "rate",
    ),
}
