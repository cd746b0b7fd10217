"""Times of steps beside what is claimed of them: a table, sentences, a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib import colormaps
from matplotlib.figure import Figure

from lab.markdown import markdown
from lab.papers.claims import Claim, Experiment, Step
from lab.svg import FLOOR, INK

_FIGURES = {"seconds": "step", "exposed": "exposed exchange", "select": "selection"}


@dataclass(frozen=True)
class Gain:
    """One comparison.

    Args:
        model, condition: Where.
        claim: Which one it belongs to.
        pair: The system whose figure is larger, and the one that it is compared with.
        percent: By how much it is; NaN where one was not measured.
        claimed: From the least to the most that is claimed; None where nothing is.
    """

    model: str
    condition: str
    claim: Claim
    pair: tuple[str, str]
    percent: float
    claimed: tuple[float, float] | None

    @property
    def holds(self) -> bool:
        """Whether it is as good as claimed."""
        return self.claimed is not None and self.claim.reached(self.percent, self.claimed)


def gains(experiment: Experiment, steps: Sequence[Step]) -> list[Gain]:
    """Every comparison of an experiment for which there are figures."""
    places: dict[tuple[str, str], dict[str, Step]] = {}
    for step in steps:
        places.setdefault((step.model, step.condition), {})[step.system] = step
    return [
        Gain(*place, claim, pair, claim.gain(pair, known), claim.range(*place))
        for place, known in places.items()
        for claim in experiment.claims
        for pair in claim.pairs
    ]


def table(experiment: Experiment, steps: Sequence[Step]) -> str:
    """A row for each model and condition; in front of the comparisons of a claim what it says."""
    found = {(gain.model, gain.condition, gain.claim.figure, gain.pair): gain for gain in gains(experiment, steps)}
    heads = ["model", "condition"]
    for claim in experiment.claims:
        heads += ["claimed"] * bool(claim.ranges) + [_head(claim, pair) for pair in claim.pairs]
    rows = []
    for model, condition in dict.fromkeys((step.model, step.condition) for step in steps):
        cells = [model, condition]
        for claim in experiment.claims:
            if claim.ranges:
                cells.append(_claimed(claim.range(model, condition)))
            cells += [_percent(found[model, condition, claim.figure, pair].percent) for pair in claim.pairs]
        rows.append(cells)
    return markdown(heads, rows, names=2)


def sentences(experiment: Experiment, steps: Sequence[Step]) -> list[str]:
    """One for each claim: whether it is reached, and how far the figures go."""
    return [_sentence(claim, each) for claim, each in _by_claim(experiment, steps)]


def _by_claim(experiment: Experiment, steps: Sequence[Step]) -> Iterator[tuple[Claim, list[Gain]]]:
    known = [gain for gain in gains(experiment, steps) if not math.isnan(gain.percent)]
    for claim in experiment.claims:
        yield claim, [gain for gain in known if gain.claim is claim]


def _sentence(claim: Claim, known: Sequence[Gain]) -> str:
    what = f"the {_FIGURES[claim.figure]} of {_listed(more for more, _ in claim.pairs)}"
    against = f"that of {_listed(less for _, less in claim.pairs)}"
    if not known:
        return f"Not decided: {what} could not be compared with {against}."
    least, most = (bound(gain.percent for gain in known) for bound in (min, max))
    found = f"{what} differs from {against} by {_percent(least)}" + f" to {_percent(most)}" * (most > least)
    ranges = [gain.claimed for gain in known if gain.claimed is not None]
    if not ranges:
        return f"Not in the slides: {found}."
    good = sum(gain.holds for gain in known)
    verdict = "is reached" if good == len(known) else "is reached in part" if good else "is not reached"
    claimed = _claimed((min(low for low, _ in ranges), max(high for _, high in ranges)))
    enough = "no more than" if claim.at_most else "at least"
    return (
        f"**The claim {verdict}**: {found}, claimed are {claimed}. "
        f"{good} of {len(known)} comparisons show {enough} what is claimed."
    )


def size(experiment: Experiment, steps: Sequence[Step]) -> tuple[float, float]:
    """Inches that :func:`draw` needs."""
    panels = sum(bool(claim.ranges) for claim in experiment.claims)
    return 8, 1.2 + panels * (1.3 + 0.3 * len({(step.model, step.condition) for step in steps}))


def draw(experiment: Experiment, steps: Sequence[Step], figure: Figure) -> None:
    """A panel for each claim: points for what was found, grey for what is claimed."""
    panels = [(claim, each) for claim, each in _by_claim(experiment, steps) if claim.ranges]
    places = list(dict.fromkeys((step.model, step.condition) for step in steps))
    for axes, (claim, known) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for height, place in enumerate(places):
            claimed = claim.range(*place)
            if claimed is not None:
                low, high = claimed
                width = max(high - low, 1.0)
                label = "claimed" if height == 0 else None
                axes.barh(height, width, left=low, height=0.7, color=FLOOR, label=label)
        for number, pair in enumerate(claim.pairs):
            points = [(gain.percent, places.index((gain.model, gain.condition))) for gain in known if gain.pair == pair]
            if points:
                across, heights = zip(*points, strict=True)
                color = colormaps["tab10"](number)
                axes.plot(across, heights, "o", color=color, alpha=0.8, label=_head(claim, pair))
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(places)), [", ".join(place) for place in places], fontsize="small")
        axes.set_ylim(len(places) - 0.5, -0.5)
        axes.set_xlabel(f"{_FIGURES[claim.figure]}, per cent above", fontsize="small")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _head(claim: Claim, pair: tuple[str, str]) -> str:
    more, less = pair
    figure = "" if claim.figure == "seconds" else f"{_FIGURES[claim.figure].rpartition(' ')[0] or claim.figure}: "
    return f"{figure}{more} over {less}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _percent(value: float) -> str:
    digits = 1 if abs(value) < 10 else 0
    return "" if math.isnan(value) else f"{round(value, digits) + 0.0:+.{digits}f} %"  # no -0.0


def _claimed(claimed: tuple[float, float] | None) -> str:
    if claimed is None:
        return ""
    low, high = claimed
    return f"{low:+g} %" if low == high else f"{low:+g} to {high:+g} %"
