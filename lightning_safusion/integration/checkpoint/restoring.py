"""Restores the engine: every rank reads and checks its parts, all compare verdicts, and only then anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.opening import are_first_windows
from lightning_safusion.fusion.state import MemoryBuilder, restore_common, restore_sparsifier, restore_unstepped
from lightning_safusion.integration.checkpoint import parts
from lightning_safusion.integration.checkpoint.parts import ENTRY, KNOWN_FORMATS, UnusablePart, not_finite
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.memory.momentum import AutoEF21Memory
from lightning_safusion.sparsify.memory.residual import AutoMemory

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

# Neither plan nor measured costs depend on the first and the last; the engine notices a change of the second.
_NOT_PLANNED_WITH = ("memory", "density", "select_by", "quota", "integrity")
_NONCE = re.compile("[0-9a-f]+")  # it is a part of file names
_ENGINE_KEYS = ("windows", "density", "tensors", "order_known", "planner")
_SHOWN = 8


@dataclass
class _Verdict:
    """What one rank has found in its parts; small, since all ranks get it."""

    format: Any
    checkpoint: tuple[str, str]  # nonce, number of workers
    entry_problem: str | None = None
    part_problem: str | None = None
    fields: set[str] = field(default_factory=set)
    mismatches: list[str] = field(default_factory=list)
    not_finite: dict[str, int] = field(default_factory=dict)  # tensor: rank that saved it


Read = Callable[[int], dict[str, Any]]


def restore(
    engine: Engine, settings: Mapping[str, str], entry: Mapping[str, Any], path: _PATH, read: Read | None = None
) -> list[str]:
    """Restores what :func:`save` saved. Collective; every rank decides the same.

    On as many workers as saved it, each takes its own part. On another number each takes the mean of all parts, so
    that the residuals of all workers together, 1/P of the sum over P workers, stay what they were.

    Args:
        engine: Between two windows.
        settings: The job's settings as text, equal on all ranks.
        entry, path: Of the main checkpoint.
        read: Returns the part of a rank; by default the file beside ``path``, or what lies in the entry.

    Returns:
        What could not be restored and why, the same on all ranks; empty if everything was.

    Raises:
        ValueError: On all ranks, if the entry of any is damaged.
    """
    transport = engine.transport
    engine.reset()
    builder = MemoryBuilder(engine)
    own, verdict = _examine(engine, builder, entry, read or partial(parts.read, path, entry=entry))
    verdicts: list[_Verdict] = transport.gather_objects(verdict)
    _refuse(path, [each.entry_problem for each in verdicts])
    unknown = [each.format for each in verdicts if each.format not in KNOWN_FORMATS]
    if unknown:
        return [f"{path} has a format (version {unknown[0]}) that this version does not know"]
    notes = _changes(entry["settings"], settings)
    lost = _problems(verdicts)
    if lost:
        builder = MemoryBuilder(engine)
        notes.append(
            f"its residuals cannot be used ({'; '.join(lost[:4])}), so that every worker begins with empty ones: "
            f"{_loss(engine.space.memory)}"
        )
    else:
        for flat in builder.fields.values() if own is None else ():
            transport.all_reduce(flat).wait()
        notes += _dropped(builder, verdicts)
    outcomes = transport.gather_objects(_apply(engine, settings, entry, builder, None if lost else own))
    _refuse(path, [problem for problem, _ in outcomes])
    new = [f"the compressor of rank {rank} begins anew: {why}" for rank, (_, why) in enumerate(outcomes) if why]
    return notes + new[:_SHOWN]


def _examine(
    engine: Engine, builder: MemoryBuilder, entry: Mapping[str, Any], read: Read
) -> tuple[dict[str, Any] | None, _Verdict]:
    """Reads and checks; changes nothing, and raises nothing, so that all ranks exchange verdicts.

    On another number of workers there is no part of this rank's own.
    """
    verdict = _Verdict(entry.get("format"), (str(entry.get("nonce")), str(entry.get("world_size"))))
    own: dict[str, Any] | None = None
    try:
        verdict.entry_problem = _entry_problem(entry)
        if verdict.entry_problem or entry["format"] not in KNOWN_FORMATS:
            return None, verdict
        rank, world_size, saved_by = engine.transport.rank, engine.transport.world_size, entry["world_size"]
        same = saved_by == world_size
        # on another number of workers the ranks share the reading
        for place in [rank] if same else range(rank, saved_by, world_size):
            part = read(place)
            own = part if same else None
            verdict.fields |= part["memory"].keys()
            verdict.mismatches += builder.mismatches(part["memory"])
            verdict.not_finite |= dict.fromkeys(not_finite(part["memory"]), place)
            builder.add(part["memory"], 1.0 if same else 1.0 / saved_by)
    except UnusablePart as error:
        verdict.part_problem = str(error)
    except Exception as error:
        verdict.part_problem = f"rank {engine.transport.rank} could not take in its part: {error!r:.200}"
    return own, verdict


def _entry_problem(entry: Mapping[str, Any]) -> str | None:
    if not isinstance(entry.get("format"), int):
        return f"has {entry.get('format')!r:.50} as 'format'"
    if entry["format"] not in KNOWN_FORMATS:
        return None
    kinds: dict[str, type] = {"nonce": str, "world_size": int, "settings": dict, "engine": dict}
    kinds |= {"digests": list} if entry["format"] > 1 else {}
    for key, kind in kinds.items():
        if not isinstance(entry.get(key), kind):
            return f"lacks {key!r}" if key not in entry else f"has {entry[key]!r:.50} as {key!r}"
    if entry["world_size"] < 1 or len(entry.get("digests", range(entry["world_size"]))) != entry["world_size"]:
        return f"has {len(entry.get('digests', []))} digests for {entry['world_size']} workers"
    for part, keys in {"engine": _ENGINE_KEYS, "settings": ("compressor", "memory")}.items():
        for key in keys:
            if key not in entry[part]:
                return f"lacks {key!r} in {part!r}"
    for key, text in entry["settings"].items():
        if not isinstance(text, str):
            return f"has {text!r:.50} as {key!r} in 'settings'"
    if not _NONCE.fullmatch(entry["nonce"]):
        return f"has {entry['nonce']!r:.50} as 'nonce'"
    return _counters_problem(entry["engine"])


def _counters_problem(engine: Mapping[str, Any]) -> str | None:
    windows, density, tensors = engine["windows"], engine["density"], engine["tensors"]
    if type(windows) is not int or windows < 0:
        return f"has {windows!r:.50} as 'windows' in 'engine'"
    if not isinstance(density, (int, float)) or not 0 < density <= 1:
        return f"has {density!r:.50} as 'density' in 'engine'"
    if not isinstance(tensors, list) or not all(isinstance(name, str) for name in tensors):
        return f"has {tensors!r:.50} as 'tensors' in 'engine'"
    first = engine.get("first_windows")  # older checkpoints have none
    if first is not None and not are_first_windows(first):
        return f"has {first!r:.80} as 'first_windows' in 'engine'"
    return None


def _refuse(path: _PATH, problems: Sequence[str | None]) -> None:
    named = [f"on rank {rank} it {problem}" for rank, problem in enumerate(problems) if problem]
    if named:
        raise ValueError(
            f"the entry {ENTRY!r} of {path} is damaged ({'; '.join(named[:_SHOWN])}); take another checkpoint, or "
            f"delete the entry from this one to resume it without residuals"
        )


def _problems(verdicts: list[_Verdict]) -> list[str]:
    """Why no rank can use its residuals; each problem once."""
    problems = list(dict.fromkeys(verdict.part_problem for verdict in verdicts if verdict.part_problem))
    if len({verdict.checkpoint for verdict in verdicts}) > 1:
        problems.append("the workers have loaded different checkpoints")
    kinds = {tuple(sorted(verdict.fields)) for verdict in verdicts if verdict.fields and not verdict.part_problem}
    if len(kinds) > 1:
        problems.append(f"the parts have different fields: {', '.join(map(str, sorted(kinds)))}")
    return problems


def _loss(memory: Memory) -> str:
    carries = memory.shapes_updates or memory.lives_on_sparsity
    carries = carries or (isinstance(memory, AutoMemory | AutoEF21Memory) and not memory.conserves)
    also = ", and the momentum, which the residuals carry in the optimizer's place," if carries else ""
    return f"what the workers had accumulated and not sent yet{also} is lost"


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    notes = []
    if now["compressor"] != before["compressor"]:
        notes.append(f"the compressor was {before['compressor']} and is {now['compressor']}, which begins anew")
    was, is_now = (text["memory"].partition("(")[0] for text in (before, now))
    if is_now != was:  # its options may change: what it holds keeps its meaning
        notes.append(f"the memory was {was} and is {is_now}, which takes in only what both of them have")
    return notes


def _dropped(builder: MemoryBuilder, verdicts: list[_Verdict]) -> list[str]:
    """Empties tensors that a rank cannot restore on all ranks: a part of a memory may have to be equal on all."""
    notes = []
    mismatched = list(dict.fromkeys(name for verdict in verdicts for name in verdict.mismatches))
    if mismatched:
        notes.append(f"its residuals differ from what this job can take in: {_few(mismatched)}; these begin empty")
    saved_by = {name: rank for verdict in verdicts for name, rank in verdict.not_finite.items()}
    if saved_by:
        named = [f"{name} (rank {rank})" for name, rank in saved_by.items()]
        notes.append(f"residuals that are not finite are refused: {_few(named)}; these begin empty on all ranks")
    builder.drop([*mismatched, *saved_by])
    return notes


def _few(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _apply(
    engine: Engine,
    settings: Mapping[str, str],
    entry: Mapping[str, Any],
    builder: MemoryBuilder,
    part: Mapping[str, Any] | None,
) -> tuple[str | None, str | None]:
    """Changes the engine; returns what is wrong with the entry, and why the compressor begins anew."""
    planned = {key: text for key, text in settings.items() if key not in _NOT_PLANNED_WITH}
    same_job = entry["world_size"] == engine.transport.world_size and planned.items() <= entry["settings"].items()
    try:
        builder.restore()  # in the present order of tensors, which the next line changes
        restore_common(engine, entry["engine"], same_job)
    except Exception as error:  # values of any kind, in a file that was damaged or edited
        return f"cannot be restored: {error!r:.200}", None
    if part is not None:
        restore_unstepped(engine, part["unstepped"])
        if settings["compressor"] == entry["settings"]["compressor"]:
            try:
                restore_sparsifier(engine, part["compressor"])
            except Exception as error:  # a compressor of the user's own can raise anything
                return None, f"{error}"
    return None, None
