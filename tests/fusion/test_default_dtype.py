"""What the engine computes does not depend on torch's default dtype.

Lightning's precision plugins set it around ``training_step``, in which a manual backward pass runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_safusion
from lightning_safusion.comm.catalogue import COLLECTIVES
from lightning_safusion.comm.wire.values import VALUES
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.registry import available_sparsifiers
from tests.cluster import specs
from tests.fusion.windows import Make
from tests.models import equal

ROOT = Path(lightning_safusion.__file__).parent
# Those whose numbers take the default dtype if none is named; ``arange`` takes that of its bounds.
MAKERS = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}
DTYPES = [torch.float64, torch.bfloat16, torch.float16]
# Every part once, beside the defaults of the others.
PARTS: list[dict[str, Any]] = [
    *({"collective": name} for name in COLLECTIVES if name != "allgather"),
    *({"collective": name, "wire": "q4"} for name, row in COLLECTIVES.items() if row.few_bits),
    *({"wire": wire, "collective": "sharded"} for wire in VALUES if wire not in ("fp32", "q4")),
    *({"compressor": name} for name in available_sparsifiers() if name != "topk"),
    *({"memory": name} for name in ("decoupled", "dgc", "ef21", "none")),
    *({"quota": name} for name in ("shared", "pooled")),
    {"fusion": "naive"},
    {"scope": "group"},
]


def means(make: Make, options: dict[str, Any], dtype: torch.dtype) -> list[list[Tensor]]:
    """What two windows of three workers deliver while a default dtype is in force."""
    made = {"wire": "fp32", "collective": "allgather", "tensors": specs(((20, 30), (40,), (1,), (0,)))} | options
    workers = make(3, nodes=range(3), **made)
    given = [workers.random_grads(step) for step in range(2)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return [workers.step(grads)[0] for grads in given]
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("options", PARTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("kernels", [nullcontext, native.unused], ids=["compiled", "plain"])
def test_windows_do_not_depend_on_the_default_dtype(
    make: Make, options: dict[str, Any], kernels: Callable[[], Any]
) -> None:
    dtype = DTYPES[PARTS.index(options) % len(DTYPES)]
    with kernels():
        assert equal(means(make, options, torch.float32), means(make, options, dtype))


def test_no_tensor_is_made_without_a_dtype() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: torch.{call.func.attr}"
        for path in sorted(ROOT.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in MAKERS
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if not any(keyword.arg in ("dtype", None) for keyword in call.keywords)
    ]
    assert not found
