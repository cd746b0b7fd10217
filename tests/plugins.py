"""Packages that offer parts by entry points, as pip installs them: a module, and what importlib.metadata reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    patch: pytest.MonkeyPatch,
    folder: Path,
    offers: Mapping[str, Mapping[str, str]],
    source: str = "",
    package: str = "plugged",
) -> None:
    """Has a package importable until the end of the test.

    Args:
        patch: Undoes it.
        folder: Where it is written.
        offers: Group without its prefix, to names and entries.
        source: Its module.
        package: Its name, also that of the module.
    """
    place = folder / f"site-{package}"
    info = place / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    (place / f"{package}.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n", encoding="utf-8")
    groups = [
        "\n".join([f"[lightning_safusion.{group}]", *(f"{name} = {entry}" for name, entry in entries.items())])
        for group, entries in offers.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n", encoding="utf-8")
    patch.syspath_prepend(str(place))
