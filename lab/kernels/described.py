"""What compiled code needs of a GPU, and what is in it.

Assembly is read with the tools of the Triton that is installed, whichever made it: with one version of them, numbers of
instructions can be compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Names the folder with ``cuobjdump`` and ``nvdisasm``.
TOOLS = "SAFUSION_LAB_CUDA_TOOLS"

# Of a multiprocessor: registers, threads, blocks, and bytes of shared memory by compute capability; a block takes 1 KiB
# more than it asks for. CUDA C++ Programming Guide, "Compute Capabilities".
_REGISTERS, _THREADS, _BLOCKS, _RESERVED = 65_536, 2048, 32, 1024
_SHARED = {"80": 164 << 10, "90": 228 << 10, "100": 228 << 10}


def described(code: Mapping[str, Any], target: str, warps: int, shared: int) -> dict[str, int]:
    """Registers, spills, instructions, blocks of a multiprocessor, and operations that a kernel must have or not.

    Args:
        code: What Triton has made, by stage.
        target: Compute capability times ten, or the name of an AMD chip.
        warps: Of a program.
        shared: Bytes of shared memory that it asks for.
    """
    if target.isdigit():
        found = _of_cubin(code["cubin"], target, 32 * warps, shared) | _of_ptx(code["ptx"])
    else:
        found = _of_amd(code["amdgcn"], code["llir"])
    # what old versions of Triton make of a unary minus; a zero keeps the wrong sign
    return found | {"subtracted from 0": len(re.findall(r"\bfsub float 0\.0", code["llir"])), "shared": shared}


def _of_cubin(cubin: bytes, target: str, threads: int, shared: int) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output_of("cuobjdump", "-res-usage", file.name)
        code = _output_of("nvdisasm", "-c", "-hex", file.name)
    registers, stack = (int(_only(rf"{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    blocks = (
        _REGISTERS // (-(-registers // 8) * 8 * threads),
        _THREADS // threads,
        _SHARED[target] // (shared + _RESERVED),
        _BLOCKS,
    )
    return {
        "registers": registers,
        "spills": max(stack, len(re.findall(r"\s(?:STL|LDL)\b", code))),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", code, re.M)),
        "blocks": min(blocks),
        **_loops_of(code),
    }


def _loops_of(code: str) -> dict[str, int]:
    """Instructions of the longest loop that has no other in it, those that are in any, and those that are in none."""
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
    return {"loop": max(map(len, inner), default=0), "looped": len(inside), "once": number - len(inside)}


def _of_ptx(ptx: str) -> dict[str, int]:
    return {
        "fused": len(re.findall(r"\bfma\.(?:rn|rz)\.f32", ptx)),
        "flushed": len(re.findall(r"\.ftz\b", ptx)),
        "float atomics": len(re.findall(r"\b(?:atom|red)\S*\.f(?:16|32|64)", ptx)),
        "barriers": ptx.count("bar.sync") + ptx.count("barrier.sync"),
        "divisions": len(re.findall(r"\bdiv\.rn\.f32", ptx)),
        "roots": len(re.findall(r"\bsqrt\.rn\.f32", ptx)),
    }


def _of_amd(assembly: str, llvm: str) -> dict[str, int]:
    """Vector registers; roundings are told by the code before it: a quotient becomes several fused multiply-adds."""
    found = {
        name: int(_only(rf"\.{key}:?\s+(\d+)", assembly))
        for name, key in (("registers", "vgpr_count"), ("spills", "vgpr_spill_count"))
    }
    modes = re.search(r"\.amdhsa_float_denorm_mode_32 3\b", assembly)
    return found | {
        "instructions": len(re.findall(r"^\t[vs]_|^\t(?:ds|global|buffer|flat)_", assembly, re.M)),
        "fused": len(re.findall(r"\bllvm\.(?:fma|fmuladd)\.f32|\bcontract\b", llvm)),
        "flushed": 0 if modes else 1,
        "float atomics": len(re.findall(r"atomicrmw \w*f(?:add|max|min)", llvm)),
        "barriers": assembly.count("s_barrier"),
    }


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in {text[:500]}"
    return found[1]


def _output_of(command: str, *arguments: str) -> str:
    """What one of the compiler's tools prints."""
    program = Path(os.environ[TOOLS]) / command
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
