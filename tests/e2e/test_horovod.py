"""horovodrun: the transport, and trainings that end as those do that Lightning starts over torch.distributed."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.horovod_collectives import DTYPES
from tests.e2e.horovod_training import CASES
from tests.e2e.processes import ROOT, environment, started

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def _has_horovod(python: str) -> bool:
    return subprocess.run([python, "-c", "import horovod.torch"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with Horovod: this one, or one beside it that sees its packages.

    The script builds Horovod where its cache has no wheel for this Python and torch, which takes some minutes.
    """
    if _has_horovod(sys.executable):
        return sys.executable
    if shutil.which("c++") is None:
        pytest.skip("Horovod is not installed, and building it needs a C++ compiler")
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    beside = str(folder / "bin" / "python")
    packages = subprocess.run(
        [beside, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    Path(packages, "beside.pth").write_text("\n".join(site.getsitepackages()))
    installed = subprocess.run(
        [ROOT / "scripts" / "install_horovod.sh", beside], capture_output=True, text=True, check=False
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return beside


def horovodrun(python: str, processes: int, log: Path, *command: str | Path) -> None:
    """Runs a script of this folder as a user would."""
    run = [python, "-m", "horovod.runner.launch", "-np", str(processes), python, *command]
    env = environment(HOROVOD_GLOO_IFACE="lo")
    with started(run, log, env) as program:
        program.finish(120)


@pytest.fixture(scope="module")
def collectives(python: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: what three workers have seen."""
    folder = tmp_path_factory.mktemp("collectives")
    horovodrun(python, 3, folder / "output", HERE / "horovod_collectives.py", folder)
    return [json.loads((folder / f"collectives{rank}.json").read_text()) for rank in range(3)]


def test_collectives(collectives: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(collectives):
        assert result["place"] == [rank, 3]
        seen = result["collectives"]
        for dtype in DTYPES:
            assert seen[f"{dtype}-sum"] == [3, 12]
            assert seen[f"{dtype}-min"] == [0, 1]
            assert seen[f"{dtype}-max"] == [2, 7]
        assert seen["gathered"] == [[1], [2], [3]]
        assert seen["halves"] == [0.0, 0.5, 1.0, 0.5, 2.0, 0.5]
        assert seen["copied"] == [2, 3]
        assert seen["objects"] == [{"rank": 0}, None, None]
        assert "got a tensor of torch.bool" in result["refused"]


def test_sums_and_agreed_costs_are_bitwise_equal(collectives: list[dict[str, Any]]) -> None:
    first, *others = collectives
    assert all(result["sums"] == first["sums"] and result["costs"] == first["costs"] for result in others)


def test_names_suffice_for_any_number_of_operations(collectives: list[dict[str, Any]]) -> None:
    assert all(result["many"] == [3.0 * i for i in range(100)] for result in collectives)


def test_what_nobody_waits_for_is_not_written(collectives: list[dict[str, Any]]) -> None:
    assert all(result["abandoned"] == [0.0] * 3 for result in collectives)


def test_communicators_have_orders_of_their_own(collectives: list[dict[str, Any]]) -> None:
    assert all(result["own_pace"] == [3.0, 30.0] for result in collectives)


def test_on_done_and_lifetime(collectives: list[dict[str, Any]]) -> None:
    assert all(all(result["measured"].values()) for result in collectives), collectives


@pytest.fixture(scope="module")
def trainings(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By transport: folder with the outcome of all cases."""
    folders = {transport: tmp_path_factory.mktemp(transport) for transport in ("horovod", "torch")}
    script = HERE / "horovod_training.py"
    horovodrun(python, 2, folders["horovod"] / "output", script, folders["horovod"], "horovod")
    with started([sys.executable, script, folders["torch"], "torch"], folders["torch"] / "output") as program:
        program.finish(120)
    return folders


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_popen(trainings: dict[str, Path], case: str) -> None:
    for rank in (0, 1):
        mine, expected = (
            torch.load(trainings[transport] / f"{case}{rank}.pt", weights_only=False)
            for transport in ("horovod", "torch")
        )
        # a sum of two numbers has no order in which to round differently
        torch.testing.assert_close(mine["state"], expected["state"], rtol=0, atol=0)
        assert mine["figures"]["carrier"] == "gloo"


def test_horovod_carries_what_is_dense(trainings: dict[str, Path]) -> None:
    figures = {
        transport: torch.load(folder / "dense0.pt", weights_only=False)["figures"]
        for transport, folder in trainings.items()
    }
    assert figures["torch"]["plain_ddp"] is not None
    assert figures["horovod"]["plain_ddp"] is None
    assert set(figures["horovod"]["collectives"]) == {"allreduce"}


def test_refusals_reach_every_worker(trainings: dict[str, Path]) -> None:
    for rank in (0, 1):
        devices, sync_batchnorm = (trainings["horovod"] / f"refusals{rank}").read_text().splitlines()
        assert "give it devices=2, num_nodes=1" in devices
        assert "SyncBatchNorm (net.1)" in sync_batchnorm


def test_without_horovodrun_the_message_says_how_to_start(python: str, tmp_path: Path) -> None:
    script = HERE / "horovod_training.py"
    with started([python, script, tmp_path, "horovod"], tmp_path / "output") as program:
        program.wait_for(r"Lightning trains with 2 processes, Horovod has started 1\.", 60)
        assert "horovodrun -np 2 python train.py" in program.output
