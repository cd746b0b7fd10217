"""What a GPU compiler makes of the kernels: they compile, spill nothing, and round as the CPU does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_safusion.kernels.cuda.work import LOOPS

triton = pytest.importorskip("triton")

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

pytestmark = [
    pytest.mark.slow,  # half a minute each
    pytest.mark.skipif(not (BINARIES / "ptxas").exists(), reason="this Triton has no compiler for NVIDIA's devices"),
]

# What starts a window of a buffer, by the launches of one; others are of other formats.
OF_BUFFERS = {"compensate", "share", "narrow", "count_chunks", "write", "pack", "decode", "commit", "reduce"}


def compiled(architecture: int, cache: Path) -> dict[str, dict[str, Any]]:
    program = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    root = str(program.parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, str(program), str(architecture)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_kernels_compile_without_a_device(tmp_path: Path, architecture: int) -> None:
    found = compiled(architecture, tmp_path)
    names = {label.partition("[")[0] for label in found}
    assert names >= OF_BUFFERS | {"encode_block16", "decode_block16"}
    for label, kernel in found.items():
        name = label.partition("[")[0]
        assert kernel["fused"] == kernel["flushed"] == kernel["float atomics"] == 0, label
        if name in OF_BUFFERS:
            assert kernel["spills"] == 0, label
            assert kernel["blocks"] >= 2, label
        if name in ("decode", "reduce"):
            assert kernel["barriers"] > 0, label
        if name == "pack" and "SELECTED=True" in label:
            assert kernel["divisions"] > 0, label
        if name == "compensate" and "MOMENT=-1" not in label:
            assert kernel["divisions"] > 0, label
            assert kernel["roots"] > 0, label
    recent = [int(part) for part in triton.__version__.split(".")[:2]] >= [3, 8]  # older ones have longer histograms
    if architecture == 90 and recent:
        for name, code in counted(found).items():
            assert (code["loop"], code["once"]) == pytest.approx((LOOPS[name].length, LOOPS[name].once), rel=0.15), name


def counted(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Loops for float32 gradients with quotas by tensor, by their names in ``LOOPS``; means of several variants."""
    variants = {name: [f"{name}["] for name in LOOPS} | {
        "compensate": ["compensate[GRAD=0,MOMENT=-1,BITS=8]"],
        "compensate by update": ["compensate[GRAD=0,MOMENT=0,BITS=8]"],
        "narrow": [f"narrow[BITS_BEFORE={bits}" for bits in ("8,BITS=11", "11,BITS=12")],
        "count_chunks": ["count_chunks[BITS=12,"],
        "pack": ["pack[SELECTED=True"],
        "decode": ["decode[KIND=0"],
    }  # fmt: skip
    means = {}
    for name, heads in variants.items():
        rows = [next(row for label, row in found.items() if label.startswith(head)) for head in heads]
        means[name] = {part: sum(row[part] for row in rows) / len(rows) for part in ("loop", "once")}
    return means
