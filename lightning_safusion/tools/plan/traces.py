"""The traces that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from lightning_safusion.lookup import check_name
from lightning_safusion.profiling.trace import Trace

# Modelled by lab/architectures.py.
_SHIPPED = {path.stem: path for path in sorted(Path(__file__).with_name("traces").glob("*.json"))}

#: Names of the traces that come with the package.
TRACE_NAMES = tuple(_SHIPPED)


def resolve_trace(trace: str | Path) -> Trace:
    """A trace that comes with the package, by name, or a JSON file.

    Raises:
        ValueError: If there is neither such a name nor such a file, or the file is not a trace.
    """
    path = _SHIPPED.get(str(trace), Path(trace))
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"{path} is no trace. If it describes a job: safusion bench --config {path}")
    if not path.is_file():
        check_name("trace", str(trace), TRACE_NAMES, "give the path of a JSON file")
    return Trace.load(path)
