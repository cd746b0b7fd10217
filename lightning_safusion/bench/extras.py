"""What a command needs beyond the package's own dependencies."""

from __future__ import annotations

import importlib.util


def need(module: str, extra: str) -> None:
    """Asks for a module before the work begins, whose results need it.

    Args:
        module: Its name.
        extra: Of this package, which brings it.

    Raises:
        ModuleNotFoundError: If it is missing; names the extra.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f'this needs {module}: pip install "lightning-safusion[{extra}]"')
