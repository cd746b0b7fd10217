"""A run of the tests that takes more processor time than its budget fails, and says which tests took it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]

FILE = """
import os
import time

import pytest


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_burns():
    burn(0.2)


def test_child_burns():
    child = os.fork()
    if child == 0:
        burn(0.4)
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.slow
def test_sleeps():
    time.sleep(0.1)
"""


def _run(pytester: pytest.Pytester, *options: str, slowness: float = 1.0) -> pytest.RunResult:
    pytester.makeconftest(f"from tests import budget\n\nbudget.LIMIT, budget.slowness = 0.3, lambda: {slowness}")
    pytester.makeini("[pytest]\nmarkers =\n  slow: takes long")
    pytester.makepyfile(FILE)
    return pytester.runpytest_subprocess("-p", "tests.budget", "-p", "xdist", *options)


@pytest.fixture(autouse=True)
def _few_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_run_within_its_budget_succeeds_and_shows_what_is_costly(pytester: pytest.Pytester) -> None:
    run = _run(pytester, "--budget", "1")
    assert run.ret == pytest.ExitCode.OK
    run.stdout.fnmatch_lines(["0.? minutes, at most 1; *", "* 0.4? s  *::test_child_burns", "* 0.2? s  *::test_burns"])
    costly = ["Quick tests above 0.3 s*", "* 0.4? s  *::test_child_burns", "*3 passed*"]
    run.stdout.fnmatch_lines(costly, consecutive=True)
    run.stdout.no_fnmatch_line("*more processor time*")


def test_a_run_above_its_budget_fails(pytester: pytest.Pytester) -> None:
    run = _run(pytester, "--budget", "0.0099", "-n", "1")  # 0.59 s, and the tests take 0.6
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*more processor time than their budget*", "*3 passed*"])


def test_a_slow_machine_has_more_time(pytester: pytest.Pytester) -> None:
    run = _run(pytester, "--budget", "0.0099", "-n", "1", slowness=100.0)
    assert run.ret == pytest.ExitCode.OK
    run.stdout.fnmatch_lines(["*takes 100.0 times as long*"])
