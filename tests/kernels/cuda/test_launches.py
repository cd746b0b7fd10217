"""What GPU compilers make of the kernels: they compile, spill nothing, and round as the CPU does.

Covers: with the Triton that is installed and with 3.6 one kind of NVIDIA's devices and one of AMD's; the former with
    the oldest that CUDA builds of torch pin, too. ``SAFUSION_VERSIONS=1`` asks for all versions and devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from lab.kernels import study
from lab.kernels.study import Found
from lightning_safusion.tools.plan.work import LOOPS

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

pytestmark = [
    pytest.mark.slow,  # minutes; half an hour for all versions
    pytest.mark.skipif(not (BINARIES / "ptxas").exists(), reason="this Triton has no compiler for NVIDIA's devices"),
]

OWN: Sequence[Sequence[str]] = (["90"], ["gfx942"])
OLDER: dict[str, Sequence[str]] = {"3.2.0": ["90"], "3.6.0": ["90"]}
if os.environ.get("SAFUSION_VERSIONS") == "1":
    OWN = (["80", "90", "100"], ["gfx942"])
    OLDER = dict.fromkeys((version for version in study.TRITONS if version != triton.__version__), study.TARGETS)


@pytest.fixture(scope="module")
def own() -> Found:
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(study.compiled, OWN)
    return {triton.__version__: {target: found for part in made for target, found in part.items()}}


@pytest.fixture(scope="module")
def all_versions(own: Found) -> Found:
    with ThreadPoolExecutor(2) as pool:
        try:
            older = dict(zip(OLDER, pool.map(study.compiled_by, OLDER, OLDER.values()), strict=True))
        except ConnectionError as error:
            pytest.skip(str(error))
    return older | own


def test_the_kernels_compile_without_a_device(own: Found) -> None:
    for variants in own[triton.__version__].values():
        names = {label.partition("[")[0] for label in variants}
        assert names >= {*study.OF_BUFFERS}
    assert study.faults(own) == []


def test_the_cost_model_counts_what_is_compiled(all_versions: Found) -> None:
    versions = [counted(all_versions[version]["90"]) for version in ("3.6.0", triton.__version__)]
    for name, loop in LOOPS.items():
        most = {part: max(found[name][part] for found in versions) for part in ("loop", "once")}
        assert (most["loop"], most["once"]) == pytest.approx((loop.length, loop.once), rel=0.05), name


def test_so_they_do_with_the_versions_that_torch_pins(all_versions: Found) -> None:
    assert study.faults(all_versions) == []
    variants = set(all_versions[triton.__version__]["90"])
    assert all(set(targets.get("90", variants)) == variants for targets in all_versions.values())


def test_no_version_needs_many_more_instructions(all_versions: Found) -> None:
    for target in ("80", "90", "100"):
        for label, ratio in study.ratios(all_versions, target).items():
            # a program of each tensor, whose sums 3.8 writes out
            assert ratio <= (1.75 if label.startswith("share") else 1.5), (label, target)


def counted(variants: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Loops for float32 gradients with quotas by tensor, by their names in ``LOOPS``."""
    heads = {name: f"{name}[" for name in LOOPS} | {
        "compensate": "compensate[GRAD=0,MOMENT=-1,BITS=11]",
        "compensate by update": "compensate[GRAD=0,MOMENT=0,BITS=11]",
        "collect": "collect[BITS_BEFORE=11,",
        "narrow": "narrow[BITS_BEFORE=10,",
        "count_chunks": "count_chunks[BITS=10,",
        "write": "write[POOLED=False,SCALED=True",
        "pack": "pack[SELECTED=True",
        "decode": "decode[KIND=0,BITS=256,OWNED=False",
        "decode of owners": "decode[KIND=0,BITS=256,OWNED=True",
        "reduce": "reduce[MOMENT=-1,",
        "reduce by update": "reduce[MOMENT=0,",
    }
    rows = {
        name: next(row for label, row in variants.items() if label.startswith(head)) for name, head in heads.items()
    }
    return {
        name: {"loop": row["looped" if name == "write" else "loop"], "once": row["once"]} for name, row in rows.items()
    }
