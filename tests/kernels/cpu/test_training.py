"""Workers with compiled kernels and without train together: replicas stay equal, and who has none is told."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from lightning_safusion import SAFusionStrategy
from lightning_safusion.kernels import cpu as native
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "behind": {"system": "behind", "compressor": "gaussiank"},
    "one bit": {"wire": "sign", "memory": "decoupled"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_replicas_are_bitwise_equal_if_one_worker_has_no_kernels(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def each(rank: int) -> tuple[torch.Tensor, list[str]]:
        strategy = SAFusionStrategy(density=0.1, collective="allgather", dense_below=0, **OPTIONS[name])
        with native.unused() if rank == 0 else contextlib.nullcontext(), caplog.at_level("INFO"):
            fitted = trainer(strategy, max_steps=8)
            fitted.fit(TinyClassifier(), classification())
        said = [record.message for record in caplog.records if "compiled kernels" in record.message]
        return torch.cat([parameter.detach().flatten() for parameter in fitted.model.parameters()]), said

    (without, said), (with_kernels, _) = run_launched(2, each)
    assert torch.equal(without, with_kernels)
    assert len(said) == 1
    assert "NumPy selects" in said[0]
