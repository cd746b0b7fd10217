"""Every stage on the CPU, with the packages that a machine with a GPU is asked for and no others."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("triton")

from lab.bench.links import why_no_links
from lab.gpu.archive import LIMIT, path_of
from lab.gpu.stages import STAGES
from lightning_safusion.tools.plan.device import Device
from tests.packaging.environments import ROOT, run

pytestmark = pytest.mark.slow  # minutes of a core, in the interpreter

#: Of every stage: how many figures it has in a rehearsal, and one of them.
FOUND = {
    "environment": (6, "the interpreter runs the kernels"),
    "steps": (60, "bert-base, bf16-mixed, 60 ms, default: added to DDP's step"),
    "numerics": (23, "messages, means, residuals: ties"),
    "passes": (31, "write: over max(bytes, instructions)"),
    "windows": (17, "the engine: overlap of two windows' selections"),
    "precisions": (10, "16-mixed, default: parameters are finite"),
    "waits": (18, "waits of a window: default"),
    "races": (4, "8 windows with random delays equal those of one kernel at a time"),
    "processes": (15, "replicas are equal: default"),
    "rivals": (6, "torch's PowerSGD hook, rank 4"),
    "trace": (2, "idle time of the busiest stream"),
    "deterministic": (3, "fused kernels: deterministic algorithms over others"),
    "selection": (21, "topk: waits"),
    "tests": (1, "tests"),
    "sanitizer": (1, "compute-sanitizer"),
    "links": (49, "perceptron, 100 Gbit/s, oktopk: throughput"),
    "shaped": (1, "shaped links") if why_no_links() else (18, "10gbit, ddp: replicas are equal"),
    "accuracy": (26, "110M, 2 %: held-out loss above dense training's"),
}

# Hides packages from a process and from those that it starts.
HIDING = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {
    "_pytest", "docstring-parser", "docstring_parser", "hypothesis", "jsonargparse", "lion-pytorch", "lion_pytorch",
    "matplotlib", "pillow", "PIL", "pytest", "scikit-learn", "schedulefree", "scipy", "sklearn", "tensorboardX",
    "tokenizers", "transformers",
}

class Rest:
    invalidate_caches = PathFinder.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(context):
        return (found for found in PathFinder.find_distributions(context) if found.metadata["Name"] not in HIDDEN)

sys.meta_path[sys.meta_path.index(PathFinder)] = Rest
"""

# The command, whose stages are forked from a process that has imported what most of them need: that takes ten seconds.
FORKING = """
import os, sys
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace
from lab.gpu import command

os.environ |= command._environment(Path(sys.argv[2]), True)  # before Triton is imported
import lab.gpu.jobs
from lab.gpu import stage

class Forked:
    def __init__(self, command, stdout, **_):
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        os.dup2(stdout.fileno(), 1)
        os.dup2(stdout.fileno(), 2)
        try:
            stage.main(*command[3:])
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)

    def wait(self, seconds):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

command.subprocess = SimpleNamespace(Popen=Forked, TimeoutExpired=TimeoutExpired)
command._end = lambda process: None
command.main(sys.argv[1:])
"""


def test_every_stage_finds_its_figures_without_a_device(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    output = tmp_path / "out"
    stages = ["--rehearse", "--stages", ",".join(STAGES)]
    command = [sys.executable, "-c", FORKING, "--output", output, *stages]
    run(*command, cwd=ROOT, timeout=1800, PYTHONPATH=str(tmp_path))
    stages = json.loads((output / "gpu.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == list(STAGES) == list(FOUND)
    for stage in stages:
        names = [figure["name"] for figure in stage["figures"]]
        number, one = FOUND[stage["name"]]
        assert stage["state"] == "done", stage
        assert len(names) == number, stage["name"]
        assert one in names
    text = (output / "gpu.md").read_text()
    assert "nothing here was measured on a device" in text
    assert "not judged" in text
    assert "pytest and hypothesis missing" in text
    assert path_of(output).stat().st_size <= LIMIT
    with tarfile.open(path_of(output)) as archive:
        assert "out/accuracy-curves.csv" in archive.getnames()
    device = Device.load(output / "device-costs.json")
    assert "not a device" in device.name
    assert {"compensate", "write", "decode", "commit"} <= set(device.factors)


def test_the_tests_that_wait_for_a_device_are_run(tmp_path: Path) -> None:
    run(sys.executable, "-m", "lab", "gpu", "--output", tmp_path, "--rehearse", "--stages", "tests", cwd=ROOT)
    (stage,) = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    figures = {figure["name"]: figure["value"] for figure in stage["figures"]}
    files = "tests/test_gpu.py", "tests/kernels/cuda/test_serves.py"
    assert all(figures[f"no test of {file} fails"] is True for file in files)
    assert figures[f"tests of {files[1]} passed"] >= 5
