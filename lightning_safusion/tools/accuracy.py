"""What is known about accuracy, by optimizer and density: the measurements of ``docs/convergence.md`` in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_safusion.comm.catalogue import BYTES_ALONE, SHARDED_FROM, shards_pay
from lightning_safusion.sparsify.schedule import SuitedDensity
from lightning_safusion.systems.rows import DEFAULT, SYSTEMS

_SOURCE = "docs/convergence.md"
#: What a user must do to know, by the spread of the runs there.
COMPARE = "Compare with dense training before a long run: a hundred steps or more, three seeds of each."
#: By optimizer and density: how training with the default ended beside dense training, on small networks.
#: Losses: above is worse. Points of accuracy: above is better.
_ADAM: Mapping[float, str] = {
    0.1: "between 3.6 % below and 0.2 % above dense training's loss",
    0.05: "between 5.3 % below and 0.6 % above dense training's loss",
    0.02: "at most 2.7 % above dense training's loss, and below it on average, from a hundred steps on",
    0.01: "between 5.1 % below and 0.6 % above dense training's loss",
    0.005: "1.0 % above dense training's loss",
    0.002: "5.7 % above dense training's loss",
}
_MEASURED: Mapping[str, Mapping[float, str]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SGD": {
        0.1: "within a point of dense training's accuracy on images, 0.4 % above its loss on an LSTM",
        0.05: "within a point of dense training's accuracy on images, 2.8 % above its loss on an LSTM",
        0.02: "0.6 points above dense training's accuracy on images; an LSTM lost more the less was sent",
        0.01: "within a point of dense training's accuracy on images, 5.4 % above its loss on an LSTM",
        0.002: "up to half a point below dense training's accuracy on images; an LSTM lost more the less was sent",
    },
    "NAdam": {0.1: "level (0.2 % below)", 0.05: "level (0.2 % below)", 0.02: "0.6 % above dense training's loss"},
    "RAdam": {0.1: "level (0.2 % below)", 0.05: "level (0.1 % below)", 0.02: "0.7 % above"},
    "RMSprop": {0.1: "level (0.4 % below)", 0.05: "level (0.4 % below)", 0.02: "0.8 % above"},
    "Adagrad": {0.1: "0.5 % above dense training's loss", 0.05: "level", 0.02: "0.8 % above"},
    "Adafactor": {0.1: "2.0 % below dense training's loss", 0.05: "2.3 % below", 0.02: "level (0.4 % below)"},
    "schedule-free": {0.1: "level (0.3 % above)", 0.05: "1.4 % above dense training's loss", 0.02: "5.6 % above"},
    "Lion": {0.25: "level (0.2 % above)", 0.1: "2.2 % above dense training's loss", 0.05: "5 %", 0.02: "9.7 %"},
    "Muon": {0.72: "level (0.5 % above)", 0.25: "1.1 % above dense training's loss"},
}
_HOOKS: Mapping[str, str] = {
    "ddp-bf16": "DDP in bf16 rounds gradients before they are added up; its accuracy was not measured here",
    "ddp-fp16": "DDP in fp16 rounds gradients before they are added up; its accuracy was not measured here",
    "powersgd": "PowerSGD of rank 1 ended 36 % above dense training's loss on a small transformer with AdamW",
    "powersgd-rank4": "PowerSGD of rank 4 ended 1 to 11 % above dense training's loss on small transformers with AdamW",
}
#: Densities of ``density=None``, where they are not that of Adam's kind.
_DENSITIES: Mapping[str, float] = {
    "SGD": SuitedDensity.PLAIN,
    "schedule-free": SuitedDensity.PLAIN,
    "RAdam": SuitedDensity.RECTIFIED,
    "Lion": SuitedDensity.CAUTIOUS,
    "Muon": SuitedDensity.ESTIMATED,
}


def default_density(optimizer: str) -> float:
    """The density that ``SAFusionStrategy()`` takes with an optimizer, by the name of its class, or "schedule-free" for
    those of schedulefree; a ValueError says that nothing is known of it."""
    name = _kind(optimizer)
    if name not in _MEASURED:
        known = ", ".join(_MEASURED)
        raise ValueError(f"optimizer {optimizer!r}: nothing is known of it; name a density as well, or one of {known}")
    return _DENSITIES.get(name, SuitedDensity.WITH_MOMENTUM)


def _kind(optimizer: str) -> str:
    """The name of a measured optimizer, for any case of its letters; another name comes back as it is."""
    given = optimizer.lower()
    if given.startswith("schedule-free"):
        return "schedule-free"
    return next((name for name in _MEASURED if name.lower() == given), optimizer)


def faster_row(system: str, time: str, known_as: str | None = None, dense: str = "DDP") -> str:
    """Says of a row that is faster than the recommended one how long its step takes, and why it is not taken.
    ``known_as``: the system that has the same gradients; ``dense``: whose gradients dense rows have."""
    name = known_as or system
    row = SYSTEMS.get(name)
    if name not in _HOOKS and row is not None and not row.sparse:
        return f"{system} is faster ({time}), with the gradients of {dense}: try it first."
    known = f"{_HOOKS[name]} ({_SOURCE})" if name in _HOOKS else "its accuracy is not known"
    return f"{system} is faster ({time}), and not recommended: {known}."


def known_accuracy(
    system: str, density: float | None, optimizers: Sequence[str], cautions: Sequence[str] = (), workers: int = 2
) -> str:
    """What is known about the accuracy of a system with these optimizers (named as for :func:`default_density`), in a
    sentence or two. ``density``: share that is sent in the long run, None where there is none; ``cautions``: what the
    strategy itself warns of."""
    if system in _HOOKS:
        return f"{_HOOKS[system]} ({_SOURCE})."
    words, measured = [f"{caution}." for caution in cautions], False
    for optimizer in dict.fromkeys(optimizers):
        table = _MEASURED.get(_kind(optimizer))
        if system != DEFAULT or table is None or density is None:
            words.append(f"Accuracy with {optimizer} and {system} is not known.")
            continue
        # what is sent less of is not known to end better: the nearest density that is no larger, else the least
        below = [each for each in table if each <= density * 1.01]
        nearest = max(below) if below else min(table)
        less = "" if below else f", and less than that ({density:.2g}) was not measured"
        words.append(
            f"Accuracy with {optimizer}: on small networks the default at a density of {nearest:g} ended "
            f"{table[nearest]}{less} ({_SOURCE})."
        )
        measured = True
        if _kind(optimizer) == "Muon":
            words.append("On a GPU PyTorch's operations select with it, which predicted times do not count.")
    if measured and shards_pay(workers, BYTES_ALONE, 1.0):
        where = "" if workers >= SHARDED_FROM else "on GPUs with slow links "
        words.append(
            f"That is with two workers. With {workers} {where}owners of shards select again: up to 0.7 % above it at a "
            "density of 2 % (docs/convergence.md#shards)."
        )
    return " ".join([*words, COMPARE])
