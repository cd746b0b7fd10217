"""horovodrun and mpirun: the transport, and trainings that end as those do that Lightning itself starts."""

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
from tests.packaging.environments import run

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# Open MPI refuses root, and more processes than cores, unless told otherwise; other mpiruns do not know these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from version 5 on
}


def _has_horovod(python: str, mpi: bool) -> bool:
    works = "import horovod.torch as hvd; " + ("raise SystemExit(not hvd.mpi_built())" if mpi else "")
    return subprocess.run([python, "-c", works], capture_output=True, check=False).returncode == 0


def _beside(folder: Path) -> str:
    """A new interpreter that sees the packages of this one behind its own."""
    run(sys.executable, "-m", "venv", folder)
    python = str(folder / "bin" / "python")
    packages = run(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    Path(packages, "beside.pth").write_text("\n".join(site.getsitepackages()))
    return python


def _has_mpi() -> bool:
    """Whether Horovod can be built with MPI, and started by it."""
    probe = ["mpicxx", "-fsyntax-only", "-x", "c++", "-"]
    return shutil.which("mpirun") is not None and (
        shutil.which("mpicxx") is not None
        and subprocess.run(probe, input=b"#include <mpi.h>", capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with Horovod, with MPI where that is installed: this one, or one beside it.

    The script builds Horovod where its cache has no wheel for this Python and torch, which takes some minutes.
    """
    mpi = _has_mpi()
    if _has_horovod(sys.executable, mpi):
        return sys.executable
    if shutil.which("c++") is None:
        pytest.skip("Horovod is not installed, and building it needs a C++ compiler")
    python = _beside(tmp_path_factory.mktemp("venv"))
    run(ROOT / "scripts" / "install_horovod.sh", *(["--mpi"] if mpi else []), python, timeout=1800)
    return python


def launch(python: str, launcher: str, processes: int, log: Path, *command: str | Path) -> None:
    """Runs a script of this folder as a user would, to its end."""
    if launcher == "horovodrun":
        launched = [python, "-m", "horovod.runner.launch", "--gloo", "-np", str(processes), python, *command]
        env = environment(HOROVOD_GLOO_IFACE="lo")
    else:
        launched = ["mpirun", "-np", str(processes), python, *command]
        env = environment(**OPEN_MPI)
    with started(launched, log, env) as program:
        program.finish(120)


@pytest.fixture(scope="module")
def collectives(python: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: what three workers that horovodrun has started have seen."""
    folder = tmp_path_factory.mktemp("collectives")
    launch(python, "horovodrun", 3, folder / "output", HERE / "horovod_collectives.py", folder)
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


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("many", [3.0 * i for i in range(100)]),  # names suffice for any number of operations
        ("pieces", [True] * 80),  # of any size reach their owners
        ("abandoned", [0.0] * 3),  # what nobody waits for is not written
        ("own_pace", [3.0, 30.0]),  # communicators have orders of their own
        ("measured", dict.fromkeys(("noticed", "once", "ordered", "released"), True)),
    ],
)
def test_every_worker_sees(collectives: list[dict[str, Any]], what: str, expected: Any) -> None:
    assert [result[what] for result in collectives] == [expected] * 3


def test_what_horovod_lacks_is_named(collectives: list[dict[str, Any]]) -> None:
    for result in collectives:
        assert [text.partition(":")[0] for text in result["lacking"]] == [
            "HorovodTransport has no permute",
            "HorovodTransport has no split",
        ]


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the outcome of all cases over torch.distributed."""
    folder = tmp_path_factory.mktemp("torch")
    with started([sys.executable, HERE / "horovod_training.py", folder, "torch"], folder / "output") as program:
        program.finish(120)
    return folder


@pytest.fixture(scope="module")
def by_horovod(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the outcome of all cases over Horovod, started by mpirun where that is installed."""
    folder = tmp_path_factory.mktemp("horovod")
    launcher = "mpirun" if _has_mpi() else "horovodrun"
    launch(python, launcher, 2, folder / "output", HERE / "horovod_training.py", folder, "horovod")
    return folder


def ended(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_popen(by_horovod: Path, by_torch: Path, case: str) -> None:
    for rank in (0, 1):
        mine, expected = (ended(folder, f"{case}{rank}") for folder in (by_horovod, by_torch))
        # a sum of two numbers has no order in which to round differently
        torch.testing.assert_close(mine["state"], expected["state"], rtol=0, atol=0)
        assert mine["figures"]["carrier"] == "gloo"


def test_horovod_carries_what_is_dense(by_horovod: Path, by_torch: Path) -> None:
    mine, expected = (ended(folder, "dense0")["figures"] for folder in (by_horovod, by_torch))
    assert expected["plain_ddp"] is not None
    assert mine["plain_ddp"] is None
    assert set(mine["collectives"]) == {"allreduce"}


def test_refusals_reach_every_worker(by_horovod: Path) -> None:
    for rank in (0, 1):
        devices, sync_batchnorm = (by_horovod / f"refusals{rank}").read_text().splitlines()
        assert "give it devices=2, num_nodes=1" in devices
        assert "SyncBatchNorm (net.1)" in sync_batchnorm


def test_without_horovodrun_the_message_says_how_to_start(python: str, tmp_path: Path) -> None:
    script = HERE / "horovod_training.py"
    with started([python, script, tmp_path, "horovod"], tmp_path / "output") as program:
        program.wait_for(r"Lightning trains with 2 processes, Horovod has started 1\.", 180)
        assert "horovodrun -np 2 python train.py" in program.output
