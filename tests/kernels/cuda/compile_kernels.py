"""Compiles every kernel for a GPU that need not be there, and prints their names: ``python compile_kernels.py 90``.

The interpreter is more forgiving than the compiler. A process of its own: kernels are made for one of the two when
Triton is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels.cuda import messages, selection, statistics, view, wire
from lightning_safusion.kernels.cuda.launch import NUM_WARPS
from lightning_safusion.sparsify.base import Segments, Selection

TYPES = {
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
}


COMPILED: set[str] = set()


def compile_only(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Takes the place of a launch."""
    types = ["*" + TYPES[given.dtype] if isinstance(given, Tensor) else "i32" for given in arguments]
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constexprs=constants)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    assert "cubin" in compiled.asm
    COMPILED.add(kernel.__name__)


def main() -> None:
    view.launch = wire.launch = compile_only
    thresholds, ranks = torch.ones(3), np.array([1, 2, 3])
    segments = Segments(np.array([0, 10_000, 10_001, 30_000]), np.array([5, 1, 7]), (0, 1, 2), ((1,),) * 3)
    span = view.TritonView(torch.ones(30_000), segments)
    span.top(), span.take(thresholds), span.kth_largest(ranks)
    span.moments(), span.log_abs_sums(), span.abs_max(), span.count_above(thresholds), span.tail_moments(thresholds)
    for name, count in (("coo-fp32", 13), ("block16-bf16", torch.tensor(12)), ("bitmap-fp16", 13)):
        codec = resolve_codec(name, 30_000, 13, torch.float32)
        fields = codec._fields(torch.zeros(codec.nbytes, dtype=torch.uint8))
        wire.encode(codec.layout, Selection(torch.arange(13), torch.ones(13), count), fields, codec.values.dtype)
    wire.decode_block16(torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int16), 5)
    wire.decode_bitmap(torch.zeros(3000, dtype=torch.int32), 5)
    kernels = {
        name
        for module in (messages, selection, statistics)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and not name.startswith("_")
    }
    assert kernels == COMPILED, COMPILED ^ kernels
    print(*sorted(COMPILED))


if __name__ == "__main__":
    main()
