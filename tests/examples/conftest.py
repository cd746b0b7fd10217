"""Conditions that the tests of the examples share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns where a process with arguments of its own passes others."""
    monkeypatch.setattr(sys, "argv", ["cli.py"])
