"""``safusion plan`` in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.report import run_plan


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the planner, with a calibration in ``costs.json``, and returns what it prints, in one line."""

    def run(costs: Calibration | dict[str, Any] | None = None, **options: Any) -> str:
        monkeypatch.chdir(tmp_path)
        if costs is not None:
            options["calibration"] = "costs.json"
        if isinstance(costs, Calibration):
            costs.save("costs.json")
        elif costs is not None:
            Path("costs.json").write_text(json.dumps(costs))
        run_plan(**{"trace": "lstm"} | options)
        return " ".join(capsys.readouterr().out.split())

    return run
