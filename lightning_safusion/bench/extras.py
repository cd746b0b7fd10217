"""What a command needs beyond the package's own dependencies."""

from __future__ import annotations

import importlib.util


def need(module: str, extra: str) -> None:
    """Asks for a module before the work begins whose results need it.

    Raises:
        ModuleNotFoundError: If it is missing; names the extra that brings it.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f'this needs {module}: pip install "lightning-safusion[{extra}]"')
