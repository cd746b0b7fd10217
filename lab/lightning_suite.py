"""Lightning's own tests of DDP, with SAFusionStrategy in DDP's place, beside stock DDP.

$ git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
$ python -m lab lightning-suite --tests pytorch-lightning/tests --output suite

Every test of ``tests_pytorch`` that names DDP (:func:`lab.lightning_plugin.names_ddp`) runs in one process of pytest,
as in Lightning's own CI. Lightning's marks decide which can run on this machine; those that it calls standalone run one
by one. A test that hangs or ends its process counts as failed, and the others go on. Those that fail run once more,
and that counts.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lightning
import torch

from lab.lightning_plugin import AGAIN, FORK, OF_DDP, RESULTS, SETTINGS
from lab.markdown import markdown
from lightning_safusion.lookup import check_name

#: What stands in DDP's place in each run; None: DDP itself.
RUNS: dict[str, dict[str, object] | None] = {
    "ddp": None,
    "dense": {"density": 1.0},
    "default": {},
    "sparse": {"compressor": "gaussiank", "density": 0.05},
    "always-sparse": {"compressor": "gaussiank", "density": 0.05, "collective": "allgather"},
}
#: Tests, by shell pattern, whose result is known to differ, and why; docs/reliability.md says more.
DELIBERATE: dict[str, str] = {
    "*::test_pluggable_accelerator": "arguments of DDPStrategy need their names",
    "*::test_swa_callback_ddp_cpu": "a mock of `Strategy.backward` that calls the strategy's own has no end",
    "*::test_swa_resume_training_from_checkpoint_ddp": "the same mock",
    "*::test_ema_resume_ddp": "the test counts what lies in the folder of checkpoints, with the folder of residuals",
    "*::test_model_checkpoint_no_extraneous_invocations": "the test counts calls of `torch.save`, with the residuals'",
}
#: Lightning's tests take FutureWarnings for errors, which a torch newer than they are may raise.
_OPTIONS = (
    *("-q", "--color=no", "-p", "no:cacheprovider", "--rootdir=.", "--continue-on-collection-errors"),
    *("-W", "ignore::FutureWarning"),
)
_STANDALONE = "Requires: [Standalone execution]"
_HANGS, _DIES = "no result in time", "the process of the test has ended"


@dataclass(frozen=True)
class Result:
    """What became of a test: "passed", "failed" or "skipped", the line of its error, and how often it has trained."""

    outcome: str
    error: str = ""
    trained: int = 0
    seconds: float = 0.0


def lightning_suite(
    tests: Path = Path("pytorch-lightning/tests"),
    output: Path = Path("lightning_suite"),
    runs: Sequence[str] = tuple(RUNS),
    only: str = "",
    fork: bool = False,
    standalone: bool = True,
    patience: float = 300.0,
) -> None:
    """Runs Lightning's own tests of DDP with SAFusionStrategy in DDP's place, and shows what differs from stock DDP.

    Every result is a line in OUTPUT/RUN.jsonl; called again with the same folder, tests that have one are not run.

    Args:
        tests: Folder "tests" of a checkout of Lightning's repository, of the version that is installed.
        output: Folder for results and logs.
        runs: What to put in DDP's place: "ddp" (itself), "dense" (density 1), "default", "sparse" (gaussiank,
            5 %), "always-sparse" (the same with an all-gather).
        only: Files with this in their path; all by default.
        fork: Fork the workers that tests would spawn, which saves most of the time: spawned ones import all anew.
        standalone: Run what Lightning calls standalone as well, each in a process of its own.
        patience: Seconds that one test may take, and that pytest may take to find the tests.

    Raises:
        FileNotFoundError: If there are no such tests.
        RuntimeError: If pytest could not run.
        ValueError: If there is no such run.
        SystemExit: With 1 if a result differs and is not known to.
    """
    for name in runs:
        check_name("run", name, RUNS)
    files = _files_of_ddp(tests, only)
    output.mkdir(parents=True, exist_ok=True)
    found = {
        name: Run(name, tests, output, patience, (FORK,) if fork else ()).results(files, standalone) for name in runs
    }
    versions = f"Lightning {lightning.__version__}, torch {torch.__version__}"
    print(f"{versions}: tests that name DDP in {len(files)} files.\n\n{summary(found)}")
    print(
        "".join(f"\nNot run, for want of what they import: {each}" for each in _unreadable(output / f"{runs[0]}.jsonl"))
    )
    rows = differences(found)
    print(markdown(("test", "run", "result", "known"), rows, names=4) if rows else "No result differs.")
    if any(not row[-1] for row in rows):
        sys.exit(1)


def _files_of_ddp(tests: Path, only: str) -> list[str]:
    paths = sorted((tests / "tests_pytorch").rglob("test_*.py"))
    if not paths:
        raise FileNotFoundError(
            f"{tests} has no tests_pytorch/**/test_*.py: give the folder tests of Lightning's repository"
        )
    names = [path.relative_to(tests).as_posix() for path in paths if OF_DDP.search(path.read_text(encoding="utf-8"))]
    return [name for name in names if only in name]


class Run:
    """The tests with one strategy in DDP's place.

    Args:
        name: Of :data:`RUNS`.
        tests: Folder of the tests.
        output: Folder of the results.
        patience: Seconds that one test may take.
        flags: Environment variables that are set for all tests.
    """

    def __init__(self, name: str, tests: Path, output: Path, patience: float, flags: Sequence[str]) -> None:
        self._settings, self._tests, self._patience, self._flags = RUNS[name], tests, patience, flags
        self._path, self._log = (output.resolve() / f"{name}{end}" for end in (".jsonl", ".log"))

    def results(self, files: Sequence[str], standalone: bool) -> dict[str, Result]:
        """Runs what has no result yet; the result of every test."""
        whole = {"complete": list(files)}
        if not self._path.exists() or whole not in _records(self._path):
            while self._pytest(files):
                pass
            _append(self._path, whole)
        alone = {record["test"] for record in _records(self._path) if record.get("error") == _STANDALONE}
        for test, result in read_results(self._path).items():
            if standalone and result.error == _STANDALONE:
                self._pytest([test], AGAIN, "PL_RUN_STANDALONE_TESTS")
        counts = _outcomes(self._path)
        failed = [test for test, found in counts.items() if found[-1] == "failed" and found.count("failed") == 1]
        if together := [test for test in failed if test not in alone]:
            self._pytest(together, AGAIN)
        for test in failed:
            if test in alone:
                self._pytest([test], AGAIN, "PL_RUN_STANDALONE_TESTS")
        return read_results(self._path)

    def _pytest(self, targets: Sequence[str], *flags: str) -> bool:
        """Runs tests in a process; whether there may be more of them, as one has hung or ended the process."""
        self._path.touch()
        before = self._path.stat().st_size
        root = str(Path(__file__).parents[1])
        environment = os.environ | dict.fromkeys((*self._flags, *flags), "1") | {RESULTS: str(self._path)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        if self._settings is not None:
            environment[SETTINGS] = json.dumps(self._settings)
        command = [sys.executable, "-m", "pytest", "-p", "lab.lightning_plugin", *_OPTIONS, *targets]
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command, cwd=self._tests, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                hangs = self._hangs(process)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the workers that tests have left
                process.wait()
        if self._path.stat().st_size == before:
            how = (
                f"has found no tests in {self._patience:g} s" if hangs else f"has ended with code {process.returncode}"
            )
            raise RuntimeError(f"pytest {how}; its output is in {self._log}")
        if (test := _unfinished(self._path)) is None:
            return False
        error = _HANGS if hangs else _DIES
        _append(self._path, {"test": test, "outcome": "failed", "error": error})
        return True

    def _hangs(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the process; whether no test has begun or ended for longer than one may take."""
        while process.poll() is None:
            if time.time() - self._path.stat().st_mtime > self._patience:
                return True
            time.sleep(0.2)
        return False


def _records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _append(path: Path, record: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _unfinished(path: Path) -> str | None:
    records = [record for record in _records(path) if "test" in record]
    return str(records[-1]["test"]) if records and "outcome" not in records[-1] else None


def read_results(path: Path) -> dict[str, Result]:
    """The last result of every test in a file of a run."""
    ended = [record for record in _records(path) if "outcome" in record]
    return {
        str(record.pop("test")): Result(**record)  # type: ignore[arg-type]  # as the plugin writes them
        for record in ended
    }


def _outcomes(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for record in _records(path):
        if "outcome" in record:
            found.setdefault(str(record["test"]), []).append(str(record["outcome"]))
    return found


def _unreadable(path: Path) -> list[str]:
    return sorted({f"`{record['file']}` ({record['error']})" for record in _records(path) if "file" in record})


def summary(found: Mapping[str, Mapping[str, Result]]) -> str:
    """A table with a row for each run."""
    rows = []
    for name, results in found.items():
        outcomes = [result.outcome for result in results.values()]
        counts = [outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")]
        trained = sum(result.trained > 0 for result in results.values())
        rows.append((f"`{_called(name)}`", sum(counts[:2]), *counts, trained))
    return markdown(("in DDP's place", "run", "passed", "failed", "skipped", "train with it"), rows)


def _called(name: str) -> str:
    settings = RUNS[name]
    if settings is None:
        return "DDPStrategy()"
    return f"SAFusionStrategy({', '.join(f'{key}={json.dumps(value)}' for key, value in settings.items())})"


def differences(found: Mapping[str, Mapping[str, Result]]) -> list[tuple[str, str, str, str]]:
    """Test, run, result and known reason, for every result that differs from that of the first run."""
    (first, expected), *others = ((name, _by_one_name(results)) for name, results in found.items())
    rows = []
    for name, results in others:
        for test in sorted(expected.keys() | results.keys()):
            result, usual = results.get(test, Result("not run")), expected.get(test, Result("not run"))
            if result.outcome != usual.outcome:
                why = next((text for pattern, text in DELIBERATE.items() if fnmatch.fnmatchcase(test, pattern)), "")
                told = f"{result.outcome} ({first}: {usual.outcome}): {result.error or usual.error}"
                rows.append((f"`{test}`", name, told.replace("|", "\\|"), why))
    return rows


def _by_one_name(results: Mapping[str, Result]) -> dict[str, Result]:
    """Names of tests have those of their parameters: a class among them is the strategy in DDP's place."""
    return {test.replace("SAFusionStrategy", "DDPStrategy"): result for test, result in results.items()}
