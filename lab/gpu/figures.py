"""What a stage finds out: figures, each beside its budget, in a file that is whole after every line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Value = float | int | bool | str
#: How a figure came about: equality of numbers, counting, a clock, or none of them.
Kind = Literal["checked", "counted", "measured", "noted"]


@dataclass(frozen=True)
class Figure:
    """One thing that a stage has found out.

    Args:
        name: What it is.
        value: A number, a text, or whether something holds.
        unit: Of a number.
        most, least: Budget of a number.
        kind: ``"checked"``: numbers were compared, and the value must be True; ``"counted"``: the same on every
            machine; ``"measured"``: a clock or a device has said it; ``"noted"``: it has no budget.
        note: What else a reader needs: how it was found, or what is wrong.
    """

    name: str
    value: Value
    unit: str = ""
    most: float | None = None
    least: float | None = None
    kind: Kind = "measured"
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether it is inside its budget; None if it has none."""
        if self.kind == "checked":
            return self.value is True
        if isinstance(self.value, str) or (self.most is None and self.least is None):
            return None
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def budget(self) -> str:
        """In words; empty if there is none."""
        if self.kind == "checked":
            return "yes"
        limits = [("≤", self.most), ("≥", self.least)]
        return " and ".join(f"{sign} {plain(limit)}" for sign, limit in limits if limit is not None)


def plain(value: Value) -> str:
    """A value for readers: three digits that count, all of a larger whole number."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return value


def equal(name: str, same: bool, note: str = "") -> Figure:
    """That numbers are equal bit for bit, or are not."""
    return Figure(name, same, kind="checked", note=note)


def note(name: str, value: Value, unit: str = "", about: str = "") -> Figure:
    """What has no budget."""
    return Figure(name, value, unit, kind="noted", note=about)


class Lines:
    """A file of figures. What is in it outlives the process that wrote it, however that ends.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, figure: Figure) -> None:
        """Writes one; it is in the file when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(figure)) + "\n")

    def read(self) -> list[Figure]:
        """All that were written; a last line without an end is left by a process that was stopped."""
        if not self.path.exists():
            return []
        lines: Sequence[str] = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Figure(**json.loads(line)) for line in lines if line.endswith("\n")]
