"""What the callbacks have left in a run directory.

- ``overlap.json`` of :class:`~lightning_safusion.callbacks.OverlapProfiler`, which every report needs;
- ``missing_rate.json`` of :class:`~lightning_safusion.callbacks.TensorMissingRateMonitor` (keys:
  :meth:`~lightning_safusion.metrics.history.MissingRateStatistics.summary`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from lightning_safusion.metrics.history import TensorRow
from lightning_safusion.profiling.plain import from_row
from lightning_safusion.profiling.summary import FILE, VERSION, Overlap

_MISSING = "missing_rate.json"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Missing:
    """The file ``missing_rate.json``.

    Args:
        run: When the fit began.
        samples: Steps that were sampled.
        steps: First step of each column of the heat map.
        rate: Missing rate over all tensors.
        tensors: In registration order.
    """

    run: float
    samples: int
    steps: tuple[int, ...]
    rate: float
    tensors: tuple[TensorRow, ...]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Missing:
        """Reads what ``MissingRateStatistics.summary`` has made."""
        tensors = tuple(from_row(TensorRow, row) for row in content["tensors"])
        samples, rate = int(content["samples"]), float(content["missing_rate"])
        return cls(float(content["run"]), samples, tuple(content["steps"]), rate, tensors)


@dataclass(frozen=True)
class Run:
    """Everything that is known of a run.

    Args:
        folder: Where it was found.
        recorded: When its times were written.
        overlap: Times, plan and settings.
        missing: Tensors that went missing; None if that was not sampled in this fit.
        stale: File names of other fits, which are left out.
    """

    folder: Path
    recorded: datetime
    overlap: Overlap
    missing: Missing | None = None
    stale: tuple[str, ...] = ()


def load_run(folder: Path) -> Run:
    """Reads a run directory, or the logger's directory that has it as ``safusion``.

    Raises:
        ValueError: If there is no ``overlap.json``, or a file is damaged; the message names the file and the entry.
    """
    if not (folder / FILE).exists() and (folder / "safusion" / FILE).exists():
        folder = folder / "safusion"
    overlap = _read(folder / FILE, Overlap.from_dict)
    if overlap is None:
        raise ValueError(
            f"no {FILE} in {folder}: train with Trainer(callbacks=[OverlapProfiler()]), which writes it at the "
            "end of a fit, to safusion/ in the logger's directory or to its dirpath"
        )
    recorded = datetime.fromtimestamp((folder / FILE).stat().st_mtime, timezone.utc)
    missing = _read(folder / _MISSING, Missing.from_dict)
    if missing is not None and missing.run != overlap.run:
        return Run(folder, recorded, overlap, stale=(_MISSING,))
    return Run(folder, recorded, overlap, missing)


def _read(path: Path, parse: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    """What a file says; None if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"it has version {content['version']}, and this package reads version {VERSION}")
        return parse(content)
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise ValueError(f"{path} has no entry {error.args[0]!r}: write it again with this version") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
