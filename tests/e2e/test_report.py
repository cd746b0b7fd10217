"""A real training, ``safusion report``, and the page in a real browser: nothing is refused, it fits, it can be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_safusion.fusion.replan import Decision
from lightning_safusion.tools.report.curves import render_curves
from lightning_safusion.tools.report.page import reviews
from tests.e2e.browser import Browser, browser
from tests.e2e.processes import ROOT, need, started
from tests.tools.report.test_comparison import plain, sparse
from tests.tools.report.test_metrics_file import read

pytestmark = pytest.mark.slow

_LIMIT = 150.0
_SECTIONS = ["figures", "advice", "timeline", "breakdown", "plan", "tuning", "missing", "settings", "reproduce"]
_PHONE, _DESK = 390, 1280


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a training on two workers, with selection behind fusion, has left its files and the report."""
    need("chromium", "chromedriver", root=False)  # nobody would look at it
    folder = tmp_path_factory.mktemp("run")
    training = [sys.executable, ROOT / "tests" / "e2e" / "reported.py", folder, "behind", "0.01"]
    with started(training, folder / "training-output") as program:
        program.finish(_LIMIT)
    report = [sys.executable, "-m", "safusion_command", "report", folder]
    with started(report, folder / "report-output") as program:
        assert str(folder / "safusion" / "report.html") in program.finish(60.0)
    return folder / "safusion"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [_PHONE, _DESK])
def test_the_page_in_a_browser(window: Browser, run_dir: Path, tmp_path: Path, width: int, scheme: str) -> None:
    page = run_dir / "report.html"
    window.show(page, width, 900, scheme)
    assert [each for each in window.requests() if not each.startswith("data:")] == [page.as_uri()]
    assert window.console() == []
    assert window.ask("document.documentElement.scrollWidth") == width
    assert window.ask("[...document.querySelectorAll('section')].map(each => each.id)") == _SECTIONS
    sizes = window.ask("[...document.querySelectorAll('img')].map(each => each.getBoundingClientRect().toJSON())")
    assert len(sizes) == 4
    assert all(size["width"] > 300 and size["height"] > 50 for size in sizes)
    dark = window.ask("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 27)"
    assert dark == (scheme == "dark")
    window.screenshot(tmp_path / f"report-{width}-{scheme}.png")
    assert (tmp_path / f"report-{width}-{scheme}.png").stat().st_size > 50_000


def test_the_page_says_what_was_measured(window: Browser, run_dir: Path) -> None:
    overlap: dict[str, Any] = json.loads((run_dir / "overlap.json").read_text())
    missing: dict[str, Any] = json.loads((run_dir / "missing_rate.json").read_text())
    window.show(run_dir / "report.html", _DESK, 900, "light")
    text = window.ask("document.body.innerText")
    assert f"{overlap['mean']['step_s'] * 1e3:,.1f} ms" in text
    assert f"{overlap['mean']['exposed_s'] * 1e3:,.1f} ms" in text
    assert missing["missing_rate"] > 0.05  # selection behind fusion leaves tensors out
    assert f"{missing['missing_rate']:.1%} of the gradient tensors send nothing" in text
    assert "<b>scale & shift</b>" in text
    assert window.ask("document.querySelectorAll('b').length") == 0
    assert window.ask("document.querySelectorAll('#plan tbody tr').length") == len(overlap["buffers"])
    rows = reviews([Decision(**each) for each in overlap["decisions"]])
    assert window.ask("document.querySelectorAll('#tuning tbody tr').length") == len(rows) > 0


def test_names_unfold(window: Browser, run_dir: Path) -> None:
    window.show(run_dir / "report.html", _DESK, 900, "light")
    shown = "document.querySelector('#plan').innerText.includes('head.weight')"
    assert not window.ask(shown)
    window.ask("document.querySelectorAll('#plan td summary').forEach(each => each.click())")
    assert window.ask(shown)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [_PHONE, _DESK])
def test_runs_side_by_side_in_a_browser(window: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_curves([read(sparse(tmp_path / "saf")), read(plain(tmp_path / "ddp"))])[0])
    window.show(page, width, 900, scheme)
    assert [each for each in window.requests() if not each.startswith("data:")] == [page.as_uri()]
    assert window.console() == []
    assert window.ask("document.documentElement.scrollWidth") == width
    sizes = window.ask("[...document.querySelectorAll('img')].map(each => each.getBoundingClientRect().toJSON())")
    assert all(300 < size["width"] <= width and size["height"] > 150 for size in sizes)
