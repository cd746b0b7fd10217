"""What a benchmark of a user's own job says in plain words: which row, what it gains and costs, when that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from lightning_safusion.systems import DEFAULT, sharded_names
from lightning_safusion.tools.accuracy import faster_row, known_accuracy
from lightning_safusion.tools.batches import better_batches, slow_rank
from lightning_safusion.tools.bench.forecast import WORTH, rate_in_words
from lightning_safusion.tools.bench.results import Rounds, SystemFigures, Turned, steps_of
from lightning_safusion.tools.bench.rows import FLOOR, IN_STEP, YOURS, parse_row

# Rows that change the gradients so much that they are named, not recommended.
_APPROXIMATE = ("powersgd", "powersgd-rank4")
_MB = 1e6
# Options of a row that do not change what is learned, and the density, by which accuracy is known.
_NEUTRAL = ("density", "process_group_backend", "timeout", "static_graph", "find_unused_parameters")
_ALL = 0.9  # share of the elements from which on a row sends everything
# A step without any exchange that is so much longer than one of DDP was disturbed.
_DISTURBED = 1.1


@dataclass(frozen=True)
class Verdict:
    """The row to take (``"ddp"`` or :data:`YOURS`: stay), what it is compared with, and all of that in words."""

    row: str
    baseline: str
    sentences: tuple[str, ...]


def decide(figures: Sequence[SystemFigures], rounds: Rounds) -> tuple[SystemFigures, SystemFigures]:
    """The row to take, and that of the user. Among rows that are about as fast (3 %) the plainest is taken: the user's
    own, DDP in bf16, the default, others. A row must be faster in nearly all rounds."""
    known = {each.system: each for each in figures}
    baseline = known.get(YOURS) or known["ddp"]
    others = [each for each in figures if each.system not in (FLOOR, IN_STEP, baseline.system, *_APPROXIMATE)]
    able = [each for each in others if not sends_all(each)]
    faster = [each for each in able if _gain(rounds[each.system], rounds[baseline.system]) > WORTH]
    if not faster:
        return baseline, baseline
    least = min(each.step_s for each in faster)
    return min((each for each in faster if each.step_s <= (1 + WORTH) * least), key=_plainness), baseline


def sends_all(row: SystemFigures) -> bool:
    """Whether a row that could send less has done what DDP does: if it is faster, then by chance."""
    return row.by_ddp or (row.density is not None and row.density > _ALL)


def _plainness(row: SystemFigures) -> tuple[bool, bool, bool, float]:
    """Plain rows first, then the default, then what sends more."""
    return row.system not in ("ddp", YOURS), row.system != "ddp-bf16", row.system != DEFAULT, -(row.density or 0.0)


def _gain(mine: Sequence[Sequence[Turned]], theirs: Sequence[Sequence[Turned]]) -> float:
    """Share of a step that a row saves, by rounds; 0 if it does not save it in nearly all of them."""
    gains = [1 - median(steps_of(a)) / median(steps_of(b)) for a, b in zip(mine, theirs, strict=False)]
    return median(gains) if sum(gain > 0 for gain in gains) > 0.7 * len(gains) else 0.0


def judge(
    figures: Sequence[SystemFigures],
    rounds: Rounds,
    point: tuple[float | None, float | None] | None,
    compared: str,
    rival: str,
) -> Verdict:
    """The answer in plain words. ``point``: of :func:`~lightning_safusion.tools.bench.forecast.turning_point`, for the
    sparse row ``compared`` and a dense one, ``rival``; None if nothing was simulated."""
    best, baseline = decide(figures, rounds)
    known = {each.system: each for each in figures}
    floor = known[FLOOR].step_s if FLOOR in known else baseline.step_s
    stays = best is baseline
    if stays:
        said = [
            f"Keep {baseline.system}: no row is faster by more than {WORTH:.0%} of its {_ms(baseline.step_s)} step."
        ]
    else:
        said = [
            f"Take {best.system}: {_ms(best.step_s)} per step, {baseline.step_s / best.step_s:.2f} times as fast as "
            f"{baseline.system} ({_ms(baseline.step_s)}){_beside(known.get('ddp-bf16'), best, baseline)}."
        ]
    said.append(
        f"A step without any exchange takes {_ms(floor)}: {_ms(max(0.0, baseline.step_s - floor))} of "
        f"a step of {baseline.system} are the exchange and what it disturbs."
    )
    said += _doubts(floor, baseline, min(len(rounds[best.system]), len(rounds[baseline.system])))
    said += _slow_worker(rounds.get(FLOOR, ()))
    for each in figures:
        if each.by_ddp:
            said.append(f"{each.system} has left the gradients to plain DDP: {each.plain_ddp}.")
        elif sends_all(each):
            said.append(f"{each.system} sends everything: that is predicted to be as fast here.")
    if not stays and best.peak_bytes and baseline.peak_bytes:
        said.append(_memory(best, baseline))
    said += _approximate(known, best)
    said += _bandwidth(point, best.system if not stays else compared, rival, stays)
    said.append(_accuracy(best.system, rounds))
    said += _loading(rounds[baseline.system], baseline.step_s - floor)
    return Verdict(best.system, baseline.system, tuple(said))


def _beside(narrow: SystemFigures | None, best: SystemFigures, baseline: SystemFigures) -> str:
    if narrow is None or narrow is best or narrow.step_s >= baseline.step_s:
        return ""
    return f", {narrow.step_s / best.step_s:.2f} times as fast as {narrow.system}"


def _doubts(floor: float, baseline: SystemFigures, count: int) -> list[str]:
    doubts = []
    if floor > _DISTURBED * baseline.step_s:
        doubts.append("These times are disturbed: a step without any exchange took longer. Repeat on quiet machines.")
    if count < 2:
        doubts.append("All this is from one round: let it go on for more.")
    return doubts


def _slow_worker(turns: Sequence[Sequence[Turned]]) -> list[str]:
    """By steps without any exchange."""
    own = [median(seconds for each in ranks for seconds in each.steps[1:]) for ranks in zip(*turns, strict=True)]
    slow = slow_rank(own)
    if slow is None:
        return []
    others = median(own[:slow] + own[slow + 1 :])
    better = better_batches(own, [each.samples for each in turns[-1]])
    return [
        f"The others wait for rank {slow}: its step takes {_ms(own[slow])} without any exchange, theirs {_ms(others)}. "
        f'With weighting="samples", {better} would let them end together.'
    ]


def _memory(best: SystemFigures, baseline: SystemFigures) -> str:
    more = best.peak_bytes - baseline.peak_bytes
    if abs(more) < _MB:
        return f"Memory: as much per worker as {baseline.system}, within 1 MB (at the peak of a turn)."
    word = "more" if more > 0 else "less"
    return f"Memory: {abs(more) / _MB:,.0f} MB {word} per worker than {baseline.system} (at the peak of a turn)."


def _approximate(known: Mapping[str, SystemFigures], best: SystemFigures) -> list[str]:
    rows = [known[name] for name in _APPROXIMATE if name in known]
    return [faster_row(row.system, _ms(row.step_s)) for row in rows if row.step_s < (1 - WORTH) * best.step_s]


def _bandwidth(point: tuple[float | None, float | None] | None, row: str, baseline: str, stays: bool) -> list[str]:
    if point is None:
        return []
    turning, carried = point
    here = "" if carried is None else f" (collectives carry about {rate_in_words(carried)} here)"
    if turning is None:
        return [f"By simulation {row} is faster than {baseline} at no bandwidth{here}."]
    if turning == inf:
        return [f"By simulation {row} is faster than {baseline} at every bandwidth{here}."]
    at = f"about {rate_in_words(turning)}"
    if stays:
        return [f"By simulation the answer changes below {at} per machine: {row} is faster there{here}."]
    return [f"By simulation the answer changes above {at} per machine: {baseline} is as fast there{here}."]


def _accuracy(row: str, rounds: Rounds) -> str:
    if row in ("ddp", YOURS):
        return "Accuracy stays that of plain DDP." if row == "ddp" else "Accuracy stays as it is."
    ranks, parsed = rounds[row][-1], parse_row(row)
    # measurements are of the default, at several densities
    system = parsed.system if set(parsed.options) <= set(_NEUTRAL) else row
    turned = ranks[0]
    return known_accuracy(system, turned.density, turned.optimizers, turned.cautions, len(ranks))


def _loading(turns: Sequence[Sequence[Turned]], exchange: float) -> list[str]:
    loading = median(seconds for ranks in turns for rank in ranks for seconds in rank.loading[1:])
    said = f"Loading is not in these times: {_ms(loading)} per step."
    if loading > max(0.0, exchange):
        said += " The job waits for data longer than for gradients: faster loading would help more."
    return [said]


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def best_strategy(
    verdict: Verdict, options: Mapping[str, Any], failed: bool = False, sharded: bool = False
) -> dict[str, Any] | None:
    """The strategy of a verdict as LightningCLI writes it; None where the user's own stays, unless it has ``failed``.
    ``options``: of DDPStrategy, or the sizes of a mesh, from the user's own."""
    if verdict.row == verdict.baseline and not failed:
        return None
    plain = {name: value for name, value in options.items() if isinstance(value, str | int | float | bool)}
    if verdict.row == "ddp" and not sharded:
        return {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": plain}
    row = parse_row(verdict.row)
    arguments = {} if row.system == DEFAULT else {"system": sharded_names(row.system) if sharded else row.system}
    kind = "SAFusionModelParallelStrategy" if sharded else "SAFusionStrategy"
    return {"class_path": f"lightning_safusion.{kind}", "init_args": {**arguments, **row.options, **plain}}
