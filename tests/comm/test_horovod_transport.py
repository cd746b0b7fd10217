"""Horovod without Horovod: messages, refusals, and that nothing else needs it. Real runs: tests/e2e/test_horovod.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.transport.horovod import HorovodTransport, load_horovod
from lightning_safusion.environments import HorovodEnvironment
from lightning_safusion.integration.horovod import check_horovod

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_horovod.sh"


@pytest.fixture
def _no_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of Horovod fail, whether it is installed or not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)


@pytest.mark.usefixtures("_no_horovod")
@pytest.mark.parametrize(
    "ask",
    [
        load_horovod,
        HorovodTransport,
        lambda: SAFusionStrategy(transport="horovod"),
        lambda: HorovodEnvironment().world_size(),
        lambda: HorovodEnvironment().main_address,
    ],
    ids=["load", "transport", "strategy", "world_size", "main_address"],
)
def test_without_horovod_the_message_is_the_recipe(ask: Any) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        ask()
    message = str(raised.value)
    assert f"compiled for torch {torch.__version__}" in message
    assert "scripts/install_horovod.sh" in message
    assert "--no-build-isolation --no-cache-dir horovod==0.28.1" in message
    assert raised.value.name == "horovod"


@pytest.mark.usefixtures("_no_horovod")
def test_the_recipe_of_the_message_is_that_of_the_script() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        load_horovod()
    script = SCRIPT.read_text()
    for part in ('"${@/#-std=*14/-std=c++17}"', "'setuptools<81' wheel packaging 'cmake<4'", "0.28.1"):
        assert part in script
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_group_backend": "nccl"}, "needs process_group_backend='gloo' .* got 'nccl': two NCCL stacks"),
        ({"process_group": object()}, "leave process_group out"),
        ({"start_method": "fork"}, "not start_method='fork': leave start_method out"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        SAFusionStrategy(transport="horovod", **options)


def test_unknown_transport() -> None:
    with pytest.raises(ValueError, match="unknown transport 'mpi'. Choose one of 'torch', 'horovod'"):
        SAFusionStrategy(transport="mpi")  # type: ignore[arg-type]  # what is refused


def test_models_and_jobs_are_checked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_horovod(model, 2, 2)
    with pytest.raises(MisconfigurationException, match="trains with 2 processes, Horovod has started 1"):
        check_horovod(model, 1, 2)
    with pytest.raises(MisconfigurationException, match=r"does not go with SyncBatchNorm \(1\)"):
        check_horovod(nn.SyncBatchNorm.convert_sync_batchnorm(model), 2, 2)


@pytest.mark.parametrize("variable", ["HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", None])
def test_detect(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    assert HorovodEnvironment.detect() is (variable is not None)


def test_the_script_asks_for_torch_first() -> None:
    ended = subprocess.run([SCRIPT, "/bin/false"], capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 1
    assert "/bin/false has no torch: install torch first" in ended.stderr
