"""Data sets are read from local folders in their own formats; nothing is downloaded behind the user's back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def require_files(folder: Path, names: Iterable[str], source: str, option: str) -> None:
    """Checks that a data set, or a pretrained model, lies where the configuration says.

    Args:
        folder: Where it should be.
        names: Files or folders in it.
        source: Where to get it and how to unpack it, for the message.
        option: The option that names the folder, for the message.

    Raises:
        FileNotFoundError: If one is missing; says which, where to get them and where to put them.
    """
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder.absolute()} has no {', '.join(missing)}. Get {source}; put what is missing into that folder, or "
            f"name another one with --{option}. `python -m examples.workloads.make_tiny_data` makes small data for the "
            "*_tiny.yaml configurations."
        )
