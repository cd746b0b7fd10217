"""Counts what a job compiles, by window; compiles nothing and needs no device.

A program of its own, ``python -m tests.kernels.cuda.compiled``: tests make their kernels for the interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from lab.hook import all_fresh
from lab.kernels.compiling import Target
from lightning_safusion.fusion import fused
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.kernels.cuda import buffer
from lightning_safusion.kernels.cuda.window import WindowKernels
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from tests.cluster import settings
from tests.cuda import Silent

WINDOWS = 6
LONG, SHORT = (*[30_000, 300] * 6, 1, 500_000), (500,) * 40


class Made(CompiledKernel):
    """Stands in for what the compiler makes: all that it was told is its name."""

    made = 0
    started: list[tuple[Any, ...]] = []  #: what its driver has been given

    def __init__(self, source: Any, *_: Any, **__: Any) -> None:
        told = (source.signature, getattr(source, "constants", None), getattr(source, "attrs", None))
        self.function, self.packed_metadata, self.module = repr(told), None, None
        Made.made += 1

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        Made.started.append((self.function, *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)))


def compiled(sizes: Sequence[int], workers: int, dtype: torch.dtype, **options: Any) -> list[int]:
    """How many variants of kernels each window of a job with Adam compiles, after those of the job's start."""
    specs = [TensorSpec(f"t{i}", i, (size,), size, dtype) for i, size in enumerate(sizes)]
    used = settings(**{"collective": "allgather", "wire": "q4", "density": 0.02} | options)
    device = torch.device("cpu")
    engine = build_engine(used, specs, Silent(workers), device, JobTraits(measure=False, deferred=True))
    moments = [Moment(torch.zeros(size), 1e-8) for size in sizes]
    grads = [torch.zeros(size, dtype=dtype) for size in sizes]
    counts = []
    for window in range(WINDOWS):
        if window == 1:  # the optimizer has stepped
            engine.space.compare_in(UpdateUnits(lambda indices: [moments[index] for index in indices], device))
        before = Made.made
        for index in reversed(range(len(sizes))):
            engine.push(index, grads[index])
        engine.drain()
        counts.append(Made.made - before)
    if engine.record is None or not all(isinstance(each, fused.FusedShipment) for each in engine.record._shipments):
        raise RuntimeError("kernels do not serve these buffers")
    return counts


def main() -> None:
    triton.compiler.compile = Made
    triton.runtime.driver.set_active(Target("90", 0))
    buffer.probe(torch.device("cpu"))
    found: dict[str, Any] = {"start": Made.made}
    with patch.object(fused, "serves_buffers", lambda device: True), patch.object(WindowKernels, "read", all_fresh):
        found["usual"] = [
            compiled(LONG, 2, torch.float32), compiled(LONG[::-1], 8, torch.float32),
            compiled(LONG[4:], 3, torch.float32, density=0.05), compiled((LONG[-1],), 2, torch.float32),
        ]  # fmt: skip
        found["others"] = [
            compiled(SHORT, 2, torch.float32), compiled(LONG, 2, torch.bfloat16),
            compiled(LONG, 16, torch.float32, collective="sharded"), compiled(LONG, 8, torch.float32, quota="pooled"),
        ]  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
