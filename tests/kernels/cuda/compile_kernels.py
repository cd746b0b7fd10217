"""Compiles every kernel for a GPU that need not be there: ``python compile_kernels.py 90``.

Prints a JSON object: for each kernel and variant registers, bytes of spills, instructions, and what its code has. The
interpreter is more forgiving than the compiler. A process of its own: kernels are made for one of the two when Triton
is imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels.cuda import buffer, owners, wire
from lightning_safusion.kernels.cuda.launch import warps_of
from lightning_safusion.kernels.cuda.tables import KINDS, Cut, Message, Runs, ShardTables, Tables
from lightning_safusion.sparsify.base import Selection

TYPES = {
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "fp32",
    torch.float16: "fp16",
}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FOUND: dict[str, dict[str, Any]] = {}


def type_of(given: Any) -> str:
    """Of an argument, as the compiler writes it."""
    if isinstance(given, Tensor):
        return "*" + TYPES[given.dtype]
    return "fp32" if isinstance(given, float) else "i32"


def compile_only(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Takes the place of a launch."""
    named = ",".join(f"{name}={value}" for name, value in constants.items() if name not in ("BLOCK", "TILE", "GROUPS"))
    label = f"{kernel.fn.__name__}[{named}]"
    if label in FOUND:
        return
    types = dict(
        zip([name for name in kernel.arg_names if name not in constants], map(type_of, arguments), strict=True)
    )
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # memory of the allocator, and tables, are aligned; positions in them are not
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if signature[name][0] == "*"
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps_of(kernel), "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    FOUND[label] = described(compiled.asm["ptx"], compiled.asm["cubin"], 32 * warps_of(kernel))


def output_of(*command: str) -> str:
    """What one of the compiler's tools prints."""
    return subprocess.run([BINARIES / command[0], *command[1:]], capture_output=True, text=True, check=True).stdout


def loops_of(code: str) -> dict[str, int]:
    """Instructions of the longest loop that has no other in it, and those that are in no loop."""
    labels: dict[str, int] = {}
    loops: list[range] = []
    number = 0
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = number
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1])
            number += 1
            if target and labels.get(target[1], number) < number - 1:  # a branch to itself ends the code
                loops.append(range(labels[target[1]], number))
    inner = [loop for loop in loops if not any(other != loop and other[0] in loop for other in loops)]
    inside = {place for loop in loops for place in loop}
    return {"loop": max(map(len, inner), default=0), "once": number - len(inside)}


def described(ptx: str, cubin: bytes, threads: int) -> dict[str, Any]:
    """What the binary needs, and what the code has."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output_of("cuobjdump", "-res-usage", file.name)
        code = output_of("nvdisasm", "-c", "-hex", file.name)
    registers, stack, shared = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "SHARED"))
    return {
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "spills": len(re.findall(r"\s(?:STL|LDL)\b", code)),
        "blocks": 65536 // (-(-registers // 8) * 8 * threads),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", code, re.M)),
        **loops_of(code),
        "fused": len(re.findall(r"\bfma\.(?:rn|rz)\.f32", ptx)),
        "flushed": len(re.findall(r"\.ftz\b", ptx)),
        "float atomics": len(re.findall(r"\b(?:atom|red)\S*\.f(?:16|32|64)", ptx)),
        "barriers": ptx.count("bar.sync") + ptx.count("barrier.sync"),
        "divisions": len(re.findall(r"\bdiv\.rn\.f32", ptx)),
        "roots": len(re.findall(r"\bsqrt\.rn\.f32", ptx)),
    }


def tables(pool: int, kind: int, selected: bool = True, sizes: tuple[int, ...] = (60_000, 10_000, 1000)) -> Tables:
    """A buffer of three tensors, the last of them dense, or all."""
    number = np.arange(4)
    runs = Runs(number * 1000, number * 3, number[:3] * 60, np.full(3, 10)) if selected else None
    capacity = 7000 + pool if selected else 0
    message = Message(capacity, 3, 180 if selected else 0, (16, 32, 800, 1600, 2600), 12_800, 16, runs)
    quotas = np.array([6000, 1000, 0]) if selected else np.zeros(3, int)
    lanes = np.array([-1, -1, 11_000]) if selected else np.array([16, 2000, 3000])
    return Tables(np.concatenate([[0], np.cumsum(sizes)]), quotas, pool, np.full(3, kind), lanes, message)


def compile_buffer(own: Tables, moment: int | None) -> None:
    """Compiles what a window with a buffer starts; ``moment``: kind of second moments."""
    memory, workspace = torch.zeros(own.numel), buffer.Workspace(torch.device("cpu"))
    sent, received = torch.zeros(12_800, dtype=torch.uint8), torch.zeros(25_600, dtype=torch.uint8)
    kernels = buffer.BufferKernels(own, memory, sent, received, 0, workspace)
    grads = [torch.zeros(size, dtype=KINDS[int(own.kinds[0])]) for size in own.sizes.tolist()]
    weighing = None
    if moment is not None:
        moments = [grad.to(KINDS[moment]) for grad in grads]
        weighing = buffer.Weighing(moments, [1e-8] * 3, memory.view(torch.int32))
    kernels.locate(grads, weighing)
    kernels.select(0.9, weighing)
    kernels.pack(0)
    window = buffer.WindowKernels(torch.device("cpu"))
    kernels.decode(0.9, window.status)
    window.commit([kernels])


def compile_owner(own: Tables, moment: int | None) -> None:
    """Compiles what a window starts with a buffer whose shards have owners: itself is a shard, of one worker."""
    number, device = own.number, torch.device("cpu")
    whole = np.arange(number)
    cut = Cut(whole, 0 * whole, 0 * whole, [own.message], [0], own.edges[:-1], number)
    tables = replace(own, cut=cut, quotas=own.quotas, pool=0)
    shard = replace(tables, lanes=np.full(number, -1), kinds=0 * whole)
    sent, received = torch.zeros(12_800, dtype=torch.uint8), torch.zeros(2, 12_800, dtype=torch.uint8)
    mail = owners.Mail(sent, received[:1], sent, received, torch.zeros(10), 0)
    memory, workspaces = torch.zeros(own.numel), [buffer.Workspace(device) for _ in range(2)]
    kernels = owners.OwnerKernels(ShardTables(tables, tables, shard, shard, own.lanes), memory, mail, 0, *workspaces)
    kernels._owned = whole
    grads = [torch.zeros(size, dtype=KINDS[int(own.kinds[0])]) for size in own.sizes.tolist()]
    weighing = None
    if moment is not None:
        moments = [grad.to(KINDS[moment]) for grad in grads]
        weighing = buffer.Weighing(moments, [1e-8] * number, memory.view(torch.int32))
    kernels.locate(grads, weighing)
    kernels.select(0.9, weighing)
    kernels.pack(0)
    kernels.reduce()
    kernels.decode(0.9, buffer.WindowKernels(device).status)


def compile_wire() -> None:
    """Compiles what writes and reads messages of other formats."""
    for name, count in (("coo-fp32", 13), ("block16-bf16", torch.tensor(12)), ("bitmap-fp16", 13)):
        codec = resolve_codec(name, 30_000, 13, torch.float32)
        fields = codec._fields(torch.zeros(codec.nbytes, dtype=torch.uint8))
        wire.encode(codec.layout, Selection(torch.arange(13), torch.ones(13), count), fields, codec.values.dtype)
    wire.decode_block16(torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int16), 5)
    wire.decode_bitmap(torch.zeros(3000, dtype=torch.int32), 5)


def main() -> None:
    buffer.launch = wire.launch = compile_only
    for pool in (0, 200):
        for kind, moment in ((0, None), (0, 0), (1, 1), (2, 0)):
            compile_buffer(tables(pool, kind), moment)
        compile_buffer(tables(pool, 0, sizes=(8000, 9000, 1000)), None)
    compile_buffer(tables(0, 0, selected=False), None)
    for kind, moment in ((0, None), (0, 0), (1, 1), (2, 2)):
        compile_owner(tables(0, kind), moment)
    compile_wire()
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
