"""A plugin for pytest: SAFusionStrategy in DDP's place in Lightning's own tests, and what became of each test.

:mod:`lab.lightning_suite` starts pytest with it, and says by environment variables what to put in DDP's place and where
results go. Processes that tests spawn import it as well, with the strategy that they are given.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch.strategies as strategies
import pytest
import torch.multiprocessing
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer import call

import lightning_safusion

#: Environment variables. Without settings the tests meet stock DDP.
SETTINGS, RESULTS = "SAFUSION_SUITE_SETTINGS", "SAFUSION_SUITE_RESULTS"
AGAIN, FORK = "SAFUSION_SUITE_AGAIN", "SAFUSION_SUITE_FORK"
OF_DDP = re.compile("ddp", re.IGNORECASE)
_GIVEN: dict[str, Any] = json.loads(os.environ.get(SETTINGS, "{}"))  # tests clear the environment


class InDDPsPlace(lightning_safusion.SAFusionStrategy):
    """The strategy with the settings of this run, where a test gives no others. Tests read its name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(inspect.signature(lightning_safusion.SAFusionStrategy).parameters, args, strict=False))
        super().__init__(**{**_GIVEN, **given, **kwargs})


def substitute() -> None:
    """Puts the strategy where ``DDPStrategy`` is imported from, and behind the names that ``Trainer`` takes."""
    # not before: to LightningCLI the name would mean two classes
    InDDPsPlace.__name__ = lightning_safusion.SAFusionStrategy.__name__
    for place in (strategies, strategies.ddp):
        vars(place)["DDPStrategy"] = InDDPsPlace
    for name, entry in list(StrategyRegistry.items()):
        if entry["strategy"] is DDPStrategy:
            options = entry["init_params"]
            StrategyRegistry.register(name, InDDPsPlace, entry["description"], override=True, **options)


def forget_names() -> None:
    """Takes the package's own names from those that ``Trainer`` takes: a test of Lightning lists them."""
    for name, entry in list(StrategyRegistry.items()):
        if entry["strategy"] is lightning_safusion.SAFusionStrategy:
            StrategyRegistry.remove(name)


def names_ddp(item: pytest.Function) -> bool:
    """Whether a test names DDP: in its name, its source with decorators, or that of what it calls in its file."""
    return bool(OF_DDP.search(item.name)) or _source_names_ddp(inspect.unwrap(item.obj), item.module)


@cache
def _source_names_ddp(thing: Any, module: ModuleType) -> bool:
    left, seen = [thing], {thing.__name__}
    while left:
        text = _source(left.pop())
        if OF_DDP.search(text):
            return True
        for name in set(re.findall(r"\w+", text)) - seen:
            seen.add(name)
            used = vars(module).get(name)
            if (inspect.isfunction(used) or inspect.isclass(used)) and used.__module__ == module.__name__:
                left.append(used)
    return False


@cache
def _source(thing: Any) -> str:
    return inspect.getsource(thing)


class Recorder:
    """Chooses the tests, and writes a line for each as it begins and as it ends.

    Args:
        path: File of the results. Tests that have one are not run again, unless ``again``.
    """

    def __init__(self, path: Path, again: bool) -> None:
        self.path, self._again = path, again
        self._trained = 0
        self._outcome, self._error, self._seconds = "passed", "", 0.0

    @cached_property
    def _ended(self) -> set[str]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() and not self._again else ()
        return {record["test"] for record in map(json.loads, lines) if "outcome" in record}

    def write(self, **record: object) -> None:
        """A line of JSON."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def trains(self, strategy: object) -> None:
        """Counts that a trainer begins to work (fit, validate, test or predict) with DDP, or what is in its place."""
        self._trained += isinstance(strategy, DDPStrategy)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(file=report.nodeid, error=_last_line(str(report.longrepr)))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        chosen: list[pytest.Function] = []
        others: list[pytest.Function] = []
        for item in items:
            (chosen if item.nodeid not in self._ended and names_ddp(item) else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
        self.write(chosen=len(chosen))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._trained, self._outcome, self._error, self._seconds = 0, "passed", "", 0.0
        self.write(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome, self._error = report.outcome, _telling_line(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._outcome == "rerun":  # by pytest-rerunfailures: Lightning marks tests that may fail now and then
            return
        seconds = round(self._seconds, 2)
        self.write(test=nodeid, outcome=self._outcome, error=self._error, trained=self._trained, seconds=seconds)


def _telling_line(problem: Any) -> str:
    """Why a test was skipped, or the first line of its error: the last where it quotes that of another process."""
    if isinstance(problem, tuple):
        return str(problem[2]).removeprefix("Skipped: ")
    crash = getattr(problem, "reprcrash", None)
    text = str(problem if crash is None else crash.message).strip()
    return _last_line(text) if crash is None or "ProcessRaisedException" in text else text.partition("\n")[0]


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


def pytest_configure(config: pytest.Config) -> None:
    """Begins to record, in the process that runs the tests: not in those that Lightning starts as further ranks."""
    if "LOCAL_RANK" in os.environ or RESULTS not in os.environ:
        return
    recorder = Recorder(Path(os.environ[RESULTS]), AGAIN in os.environ)
    config.pluginmanager.register(recorder, "lightning-suite")
    begin = call._call_and_handle_interrupt

    def counted(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.trains(trainer.strategy)
        return begin(trainer, *args, **kwargs)

    vars(call)["_call_and_handle_interrupt"] = counted


def fork_all() -> None:
    """Forks the workers that tests spawn, which import nothing then."""
    start = torch.multiprocessing.start_processes

    def forked(*args: Any, **kwargs: Any) -> Any:
        return start(*args, **{**kwargs, "start_method": "fork"})

    vars(torch.multiprocessing)["start_processes"] = forked


if RESULTS in os.environ:
    forget_names()
    if FORK in os.environ:
        fork_all()
    if SETTINGS in os.environ:
        substitute()
