"""Residuals, counters and tuner state in checkpoints.

Covers: resuming bit for bit, with plain DDP as the control.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_safusion import Aligned, ConstantDensity, DGCMemory, LinearRamp, OkTopk, SAFusionStrategy, SIDCo
from tests.process_group import run_ranks
from tests.resume import InGroup, StepModel, parameters, run, saving

SPARSE = {"density": 0.1, "collective": "allgather"}
SMALL = {"fusion": Aligned(3)}
JOBS: dict[str, dict[str, Any]] = {
    "topk": SPARSE | {"compressor": "topk"},
    "auto": {"density": 0.05},
    "pooled": SPARSE | SMALL | {"compressor": "topk", "quota": "pooled"},
    "behind": SPARSE | {"system": "behind"},
    "gaussiank": SPARSE | {"compressor": "gaussiank", "wire": "bf16"},
    "sidco": SPARSE | SMALL | {"compressor": SIDCo(adapt=True), "scope": "group"},
    "oktopk": SPARSE | {"compressor": OkTopk(refresh=5)},
    "randomk": SPARSE | {"compressor": "randomk"},
    "naive": SPARSE | {"system": "saf-naive"},
    "dgc": SPARSE | {"compressor": "dgc", "memory": DGCMemory(clip=1.0)},
    "none": SPARSE | {"memory": "none"},
    "ramp": SPARSE | SMALL | {"density": LinearRamp(0.3, 0.05, 7), "quota": "pooled"},
    "unused": SPARSE | {"find_unused_parameters": True},
}


def strategy(**options: Any) -> SAFusionStrategy:
    return SAFusionStrategy(cluster_environment=InGroup(), process_group_backend="gloo", **options)


def _resume_all(rank: int, folder: Path) -> dict[str, tuple[bool, bool]]:
    results = {}
    for name, options in {"ddp": None, **JOBS}.items():

        def fresh(options: Any = options) -> Any:
            return DDPStrategy(cluster_environment=InGroup()) if options is None else strategy(**options)

        model = {"momentum": 0.0 if name == "dgc" else 0.9}
        path = folder / f"{name}.ckpt"
        whole = run(fresh(), 9, saving(path, 4), model=StepModel(**model), deterministic=True)
        resumed = run(fresh(), 9, ckpt=path, model=StepModel(**model), deterministic=True)
        middle = torch.load(path, weights_only=True)["state_dict"].values()
        results[name] = (
            all(torch.equal(a, b) for a, b in zip(parameters(whole), parameters(resumed), strict=True)),
            all(not torch.equal(a, b) for a, b in zip(parameters(whole), middle, strict=True)),
        )
    return results


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    for results in run_ranks(2, _resume_all, tmp_path, timeout=120):
        assert [name for name, (equal, _) in results.items() if not equal] == []
        assert [name for name, (_, trained) in results.items() if not trained] == []
