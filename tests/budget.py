"""A bound on the processor time of a run (``--budget MINUTES``), and what the most costly tests have taken of it.

Processor time, user and system, of the processes of pytest and of all that they have started and awaited: unlike the
time by the clock, it depends little on what else the machine does. Budgets are minutes of a core that runs Python as
fast as the reference; a slower core, or one whose other half is busy, has more of them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from typing import Any

import pytest

LIMIT = 3.0  # seconds of a quick test that is not marked costly
_KEY = "processor_seconds"
_ITERATIONS, _REFERENCE = 2_000_000, 0.07  # of a Python loop, and the seconds that it takes


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
        self.slowness: float = slowness()
        self.tests: dict[str, float] = {}
        self.too_costly: dict[str, float] = {}
        self.workers: list[float] = []
        self.last = processor_seconds()

    def pytest_collection_finish(self) -> None:
        self.last = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """What has been used since the report before: of a test's set-up, call or end, fixtures included."""
        report = yield
        now = processor_seconds()
        report.user_properties.append((_KEY, now - self.last))
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.tests.get(report.nodeid, 0.0) + dict(report.user_properties).get(_KEY, 0.0)
        self.tests[report.nodeid] = seconds
        if seconds > LIMIT * self.slowness and not {"slow", "costly"} & report.keywords.keys():
            self.too_costly[report.nodeid] = seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # without an output the worker has crashed, and the run fails anyway
        self.workers.append(getattr(node, "workeroutput", {}).get(_KEY, 0.0))

    @property
    def total(self) -> float:
        """Seconds of all processes; workers are not counted twice, whether they have been awaited or not."""
        return processor_seconds(children=not self.workers) + sum(self.workers)

    @property
    def allowed(self) -> float:
        """Seconds that all processes may take on this machine."""
        return 60 * self.minutes * self.slowness

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.slowness = (self.slowness + slowness()) / 2
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_KEY] = self.total
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
        if self.too_costly:
            show(f"Quick tests above {LIMIT:g} s. Make them cheaper, or mark them slow (or costly, with a reason):")
        for test, seconds in self.too_costly.items():
            show(f"{seconds:7.2f} s  {test}", yellow=True)
        if total > self.allowed:
            show("The tests take more processor time than their budget: make the most costly ones cheaper.", red=True)
