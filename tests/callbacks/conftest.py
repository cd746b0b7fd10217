"""Callbacks write files: into a folder of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer without ``default_root_dir`` writes where it is."""
    monkeypatch.chdir(tmp_path)
