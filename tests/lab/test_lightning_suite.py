from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lab.lightning_plugin import names_ddp
from lab.lightning_suite import RUNS, Result, differences, read_results, summary
from tests.packaging.environments import ROOT, run

#: Tests as Lightning might have them: one that passes whatever DDP is, one that reads its name, one that ends its
#: process, one that is to run alone, and one that has nothing to do with DDP.
TESTS = """
import os

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.testing import _runif_reasons


def trained(tmp_path, strategy):
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", devices=1, strategy=strategy, fast_dev_run=True,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return trainer


def test_ends_the_process_of_ddp():
    os._exit(3)


def test_trains(tmp_path):
    assert isinstance(trained(tmp_path, "ddp").strategy, DDPStrategy)


def test_reads_the_name():
    strategy = DDPStrategy()
    assert type(strategy).__name__ == "DDPStrategy"


@pytest.mark.skipif(bool(_runif_reasons(standalone=True)[0]), reason="Requires: [Standalone execution]")
def test_stands_alone_with_ddp():
    assert os.environ["PL_RUN_STANDALONE_TESTS"] == "1"


def test_of_something_else():
    raise AssertionError
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    (tmp_path / "tests" / "tests_pytorch" / "test_tiny.py").write_text(TESTS)
    return tmp_path / "tests"


def test_a_test_is_of_ddp_if_what_it_calls_names_it(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tests / "tests_pytorch")
    import test_tiny as module

    monkeypatch.delitem(sys.modules, "test_tiny")
    assert isinstance(module, ModuleType)
    named = [
        name
        for name in vars(module)
        if name.startswith("test_")
        and names_ddp(SimpleNamespace(name=name.replace("ddp", ""), obj=vars(module)[name], module=module))
    ]
    assert named == ["test_ends_the_process_of_ddp", "test_trains", "test_reads_the_name", "test_stands_alone_with_ddp"]


def test_what_differs_from_the_first_run_is_shown_with_its_error() -> None:
    stock = {
        "a": Result("passed", trained=2),
        "d[DDPStrategy]": Result("passed"),
        "b": Result("failed", "E: 1 | 2"),
        "c": Result("skipped", "no GPU"),
    }
    ours = {
        "a": Result("failed", "E: no"),
        "d[SAFusionStrategy]": Result("passed"),
        "b": Result("passed", trained=1),
        "c": Result("skipped", "no GPU"),
    }
    assert differences({"ddp": stock, "dense": ours}) == [
        ("`a`", "dense", "failed (ddp: passed): E: no", ""),
        ("`b`", "dense", "passed (ddp: failed): E: 1 \\| 2", ""),
    ]
    assert summary({"ddp": stock}).splitlines()[-1] == "| `DDPStrategy()` | 3 | 2 | 1 | 1 | 1 |"


@pytest.mark.slow
def test_the_command_finds_what_differs(tests: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab", "lightning-suite", "--tests", tests, "--output", tmp_path / "suite"]
    with pytest.raises(AssertionError) as ended:  # the command ends with 1, for a result differs
        run(*command, "--runs", "ddp,dense", cwd=ROOT)
    results = {name: read_results(tmp_path / "suite" / f"{name}.jsonl") for name in ("ddp", "dense")}
    outcomes = {
        name: {test.rpartition("::")[2]: result.outcome for test, result in each.items()}
        for name, each in results.items()
    }
    alike = {"test_ends_the_process_of_ddp": "failed", "test_trains": "passed", "test_stands_alone_with_ddp": "passed"}
    assert outcomes == {
        "ddp": alike | {"test_reads_the_name": "passed"},
        "dense": alike | {"test_reads_the_name": "failed"},
    }
    trained = {test.rpartition("::")[2] for test, result in results["dense"].items() if result.trained}
    assert trained == {"test_trains"}
    assert "failed (ddp: passed): AssertionError: assert 'SAFusionStrategy' == 'DDPStrategy'" in str(ended.value)


def test_the_settings_of_every_run_are_those_of_a_strategy() -> None:
    from lightning_safusion import SAFusionStrategy

    for settings in RUNS.values():
        SAFusionStrategy(**json.loads(json.dumps(settings or {})))
