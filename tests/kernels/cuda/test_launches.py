"""What GPU compilers make of the kernels: they compile, spill nothing, and round as the CPU does.

Covers: with the Triton that is installed one kind of NVIDIA's devices and one of AMD's; the former with the oldest
    that CUDA builds of torch pin, and with 3.6, too. ``SAFUSION_VERSIONS=1`` asks for all versions and devices.
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
from lightning_safusion.kernels.cuda.work import LOOPS

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
# Histograms are counted by votes before Triton 3.8: most instructions over fewest, where these are known to be more.
MOST = {"compensate": 2.8, "reduce": 1.8}


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
        assert names >= {*study.OF_BUFFERS, "encode_coo", "encode_block16", "encode_bitmap", "decode_bitmap"}
    assert study.faults(own) == []


def test_the_cost_model_counts_what_is_compiled(own: Found) -> None:
    if [int(part) for part in triton.__version__.split(".")[:2]] < [3, 8]:
        pytest.skip("histograms are longer before Triton 3.8")
    for name, code in counted(own[triton.__version__]["90"]).items():
        assert (code["loop"], code["once"]) == pytest.approx((LOOPS[name].length, LOOPS[name].once), rel=0.15), name


def test_so_they_do_with_the_versions_that_torch_pins(all_versions: Found) -> None:
    assert study.faults(all_versions) == []
    variants = set(all_versions[triton.__version__]["90"])
    assert all(set(targets.get("90", variants)) == variants for targets in all_versions.values())


def test_no_version_needs_many_more_instructions(all_versions: Found) -> None:
    for target in ("80", "90", "100"):
        for label, ratio in study.ratios(all_versions, target).items():
            most = 1.5 if "BITS=0" in label else MOST.get(label.partition("[")[0], 1.5)
            assert ratio <= most, (label, target)


def counted(variants: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Loops for float32 gradients with quotas by tensor, by their names in ``LOOPS``; means of several variants."""
    heads = {name: [f"{name}["] for name in LOOPS} | {
        "compensate": ["compensate[GRAD=0,MOMENT=-1,BITS=8]"],
        "compensate by update": ["compensate[GRAD=0,MOMENT=0,BITS=8]"],
        "narrow": [f"narrow[BITS_BEFORE={bits}" for bits in ("8,BITS=11", "11,BITS=12")],
        "count_chunks": ["count_chunks[BITS=12,"],
        "pack": ["pack[SELECTED=True"],
        "decode": ["decode[KIND=0,BITS=256,OWNED=False"],
        "decode of owners": ["decode[KIND=0,BITS=256,OWNED=True"],
        "reduce": ["reduce[MOMENT=-1,"],
        "reduce by update": ["reduce[MOMENT=0,"],
    }  # fmt: skip
    means = {}
    for name, own in heads.items():
        rows = [next(row for label, row in variants.items() if label.startswith(head)) for head in own]
        means[name] = {part: sum(row[part] for row in rows) / len(rows) for part in ("loop", "once")}
    return means
