"""A bound on the processor time of a run (``--budget MINUTES``), and what the most costly tests have taken of it.

Processor time, user and system, of the processes of pytest and of all that they have started and awaited: unlike the
time by the clock, it depends little on what else the machine does. Budgets are minutes of a core that runs Python as
fast as the reference; a slower core, or one whose other half is busy, has more of them. How slow it is, is measured
between tests, beside those of the other workers: a core that is alone tells nothing about one that shares its caches.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from statistics import fmean
from time import monotonic
from typing import Any

import pytest

LIMIT = 3.0  # seconds of a quick test that is not marked costly
_KEY = "processor_seconds"
_SLOWNESS = "slowness"
_ITERATIONS, _REFERENCE = 1_000_000, 0.035  # of a Python loop, and the seconds that it takes
_EVERY = 20.0  # seconds between two measurements


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="fail if all tests together take more processor time than this; show the most costly ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("budget") is not None:
        config.pluginmanager.register(Budget(config), "processor-time")


def processor_seconds(children: bool = True) -> float:
    """User and system time of this process and of the children that it has awaited."""
    of = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN) if children else (resource.RUSAGE_SELF,)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, of))


def slowness() -> float:
    """How many times longer than the reference this core takes now; at least 1."""
    begin, total = time.process_time(), 0
    for number in range(_ITERATIONS):
        total += number
    return max(1.0, (time.process_time() - begin) / _REFERENCE)


class Budget:
    """Measures in each worker of xdist; the process that started them adds up and judges."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.minutes: float = config.getoption("budget")
        self.measured: list[float] = [slowness()]  # how slow this process's core was
        self.measured_at = monotonic()
        self.elsewhere: list[float] = []  # means of the workers
        self.tests: dict[str, float] = {}
        self.judged: set[str] = set()  # quick tests that are not marked costly
        self.workers: list[float] = []
        self.last = processor_seconds()

    def pytest_collection_finish(self) -> None:
        self.last = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """What has been used since the report before: of a test's set-up, call or end, fixtures included."""
        report = yield
        report.user_properties.append((_KEY, processor_seconds() - self.last))
        if monotonic() - self.measured_at > _EVERY:
            self.measured.append(slowness())
            self.measured_at = monotonic()
        self.last = processor_seconds()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.tests.get(report.nodeid, 0.0) + dict(report.user_properties).get(_KEY, 0.0)
        self.tests[report.nodeid] = seconds
        if not {"slow", "costly"} & report.keywords.keys():
            self.judged.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # without an output the worker has crashed, and the run fails anyway
        output = getattr(node, "workeroutput", {})
        self.workers.append(output.get(_KEY, 0.0))
        self.elsewhere.append(output.get(_SLOWNESS, 1.0))

    @property
    def slowness(self) -> float:
        """How many times longer than the reference the cores of all workers took, on average."""
        return fmean(self.elsewhere or self.measured)

    @property
    def total(self) -> float:
        """Seconds of all processes; workers are not counted twice, whether they have been awaited or not."""
        return processor_seconds(children=not self.workers) + sum(self.workers)

    @property
    def allowed(self) -> float:
        """Seconds that all processes may take on this machine."""
        return 60 * self.minutes * self.slowness

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput.update({_KEY: self.total, _SLOWNESS: self.slowness})
        elif self.total > self.allowed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        show, total = terminalreporter.write_line, self.total
        terminalreporter.section("processor time")
        rest = (total - sum(self.tests.values())) / 60
        show(
            f"{total / 60:.1f} minutes, at most {self.allowed / 60:.3g}; {rest:.1f} of them for imports and collection"
        )
        if self.slowness > 1.1:
            show(f"This machine takes {self.slowness:.1f} times as long as the one that budgets are made for.")
        for test in sorted(self.tests, key=self.tests.__getitem__, reverse=True)[:10]:
            show(f"{self.tests[test]:7.2f} s  {test}")
        too_costly = {test: self.tests[test] for test in self.judged if self.tests[test] > LIMIT * self.slowness}
        if too_costly:
            show(f"Quick tests above {LIMIT:g} s. Make them cheaper, or mark them slow (or costly, with a reason):")
        for test, seconds in too_costly.items():
            show(f"{seconds:7.2f} s  {test}", yellow=True)
        if total > self.allowed:
            show("The tests take more processor time than their budget: make the most costly ones cheaper.", red=True)
