"""Compiles every Triton kernel for GPUs that need not be there: ``python -m lab.kernels.compiling 80,90``.

Prints a JSON object: for each target, kernel and variant what :mod:`lab.kernels.described` finds in the code, or
why there is none. All targets are NVIDIA's or AMD's. A process of its own: kernels are made for the interpreter or the
compiler when Triton is imported, and the Triton that is first on the path need not be that of the installation.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from lab.kernels.described import described
from lightning_safusion.kernels.cuda import buffer, chosen, elements, launch, owners
from lightning_safusion.kernels.cuda.packer import Workspace
from lightning_safusion.kernels.cuda.tables import FOUR_BITS, KINDS, Cut, Message, Runs, ShardTables, Tables
from lightning_safusion.kernels.cuda.window import WindowKernels
from lightning_safusion.sparsify.base import Segments, Selection


class Target:
    """Stands in for a device and its driver, of which Triton asks what to compile for.

    Args:
        name: Compute capability times ten, or the name of an AMD chip.
        number: Of the device.
    """

    def __init__(self, name: str, number: int) -> None:
        self.found: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._number, self._name = number, name
        self._target = GPUTarget("cuda", int(name), 32) if name.isdigit() else GPUTarget("hip", name, 64)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Takes the place of a launch: compiles the kernel as it would, for the types that Triton sees."""
        unnamed = ("BLOCK", "TILE", "GROUPS")
        named = ",".join(f"{name}={value}" for name, value in constants.items() if name not in unnamed)
        label = f"{kernel.fn.__name__}[{named}]"
        known = self._made.get(label)
        if label in self.found and known is None:
            return  # an error
        options = launch.options_of(kernel, self._target.backend == "cuda")
        try:
            made = kernel.run(*arguments, grid=(programs,), warmup=True, **options, **constants)
        except Exception as error:  # whatever a compiler refuses with
            self.found[label] = {"error": f"{type(error).__name__}: {error}".strip()[-500:]}
            return
        if known is None:
            self._made[label] = made
            code = described(made.asm, self._name, options["num_warps"], made.metadata.shared)
            self.found[label] = {**code, "compilations": 1}
        elif made is not known:
            self.found[label]["compilations"] += 1


def tables(
    pool: int,
    kind: int,
    selected: bool = True,
    sizes: tuple[int, ...] = (70_000, 10_000, 1000),
    values: int = FOUR_BITS,
) -> Tables:
    """A buffer of three tensors, the last of them dense, or all; the first has several histograms."""
    number = np.arange(4)
    runs = Runs(number * 1000, number * 3, number[:3] * 60, np.full(3, 10)) if selected else None
    capacity = 7000 + pool if selected else 0
    parts = 180 if selected and values == FOUR_BITS else 0
    message = Message(capacity, 3, parts, (16, 32, 800, 1600, 2600), 12_800, 16, runs, values)
    quotas = np.array([6000, 1000, 0]) if selected else np.zeros(3, int)
    lanes = np.array([-1, -1, 11_000]) if selected else np.array([16, 2000, 3000])
    return Tables(np.concatenate([[0], np.cumsum(sizes)]), quotas, pool, np.full(3, kind), lanes, message)


def compile_buffer(own: Tables, moment: int | None, windows: int = 2) -> None:
    """Compiles what windows with a buffer start; ``moment``: kind of second moments."""
    memory, workspace = torch.zeros(own.numel + 1)[1:], Workspace(torch.device("cpu"))
    sent, received = torch.zeros(12_800, dtype=torch.uint8), torch.zeros(25_600, dtype=torch.uint8)
    kernels = buffer.BufferKernels(own, memory, sent, received, workspace)
    grads = [torch.zeros(size, dtype=KINDS[int(own.kinds[0])]) for size in own.sizes.tolist()]
    weighing = None
    if moment is not None:
        moments = [grad.to(KINDS[moment]) for grad in grads]
        weighing = buffer.Weighing(moments, [1e-8] * 3, memory.view(torch.int32))
    kernels.locate(grads, weighing)
    window = WindowKernels(torch.device("cpu"))
    for _ in range(windows):  # nothing may be compiled in the second window
        kernels.select(0.9, weighing)
        kernels.pack(0)
        kernels.decode(0.9, window.status)
        window.commit([kernels])


def compile_chosen(own: Tables) -> None:
    """Compiles what other compressors than Top-k start beside the kernels of a buffer."""
    memory, workspace, number = torch.zeros(own.numel + 1)[1:], Workspace(torch.device("cpu")), own.number
    sent, received = torch.zeros(12_800, dtype=torch.uint8), torch.zeros(25_600, dtype=torch.uint8)
    grads = [torch.zeros(size) for size in own.sizes.tolist()]
    segments = Segments(own.edges, own.quotas, tuple(range(number)), ((1,),) * number)
    selection = Selection(torch.arange(50), torch.ones(50), torch.tensor(40))
    placed = chosen.PlacedKernels(own, memory, sent, received, workspace)
    placed.locate(grads, None)
    estimated = chosen.ThresholdKernels(own, memory, sent, received, workspace)
    estimated.locate(grads, None)
    for _ in range(2):
        placed.add(0.9)
        placed.place(selection)
        view = estimated.add(0.9, None, segments)
        for magnitudes in (False, True):
            view.moments(magnitudes=magnitudes)
        estimated.find(view, torch.zeros(number))


def compile_buffers_of_several_kinds() -> None:
    """Compiles what ends a window whose buffers have values of several kinds."""
    device, made = torch.device("cpu"), []
    sent, received, memory = (torch.zeros(size, dtype=torch.uint8) for size in (12_800, 25_600, 4 * 81_000))
    for values in (0, FOUR_BITS):
        own, workspace = tables(0, 0, values=values), Workspace(device)
        made.append(buffer.BufferKernels(own, memory.view(torch.float32), sent, received, workspace))
        made[-1].locate([torch.zeros(size) for size in own.sizes.tolist()], None)
    WindowKernels(device).commit(made)


def compile_owner(own: Tables, moment: int | None, windows: int = 2) -> None:
    """Compiles what windows start with a buffer whose shards have owners: itself is a shard, of one worker."""
    number, device = own.number, torch.device("cpu")
    whole = np.arange(number)
    cut = Cut(whole, 0 * whole, 0 * whole, [own.message], [0], own.edges[:-1], number)
    tables = replace(own, cut=cut, quotas=own.quotas, pool=0)
    shard = replace(tables, lanes=np.full(number, -1), kinds=0 * whole)
    sent, received = torch.zeros(12_800, dtype=torch.uint8), torch.zeros(2, 12_800, dtype=torch.uint8)
    mail = owners.Mail(sent, received[:1], sent, received, torch.zeros(10), 0)
    memory, workspaces = torch.zeros(own.numel + 1)[1:], [Workspace(device) for _ in range(2)]
    kernels = owners.OwnerKernels(ShardTables(tables, tables, shard, shard), memory, mail, 0, *workspaces)
    kernels._owned = whole
    grads = [torch.zeros(size, dtype=KINDS[int(own.kinds[0])]) for size in own.sizes.tolist()]
    weighing = None
    if moment is not None:
        moments = [grad.to(KINDS[moment]) for grad in grads]
        weighing = buffer.Weighing(moments, [1e-8] * number, memory.view(torch.int32))
    kernels.locate(grads, weighing)
    window = WindowKernels(device)
    for _ in range(windows):
        kernels.select(0.9, weighing)
        kernels.pack(0)
        kernels.reduce()
        kernels.decode(0.9, window.status)
        window.commit([kernels])


def compile_all() -> None:
    """Compiles all that can be started, in all variants."""
    for pool in (0, 200):
        for kind, moment in ((0, None), (0, 0), (1, 1), (2, 0)):
            compile_buffer(tables(pool, kind), moment)
        compile_buffer(tables(pool, 0, sizes=(8000, 9000, 1000)), None)
    compile_buffer(tables(0, 0, selected=False), None)
    for kind in range(3):
        compile_buffer(tables(0, kind, values=kind), None)
    compile_buffers_of_several_kinds()
    for values in (0, FOUR_BITS):
        compile_chosen(tables(0, 0, values=values))
    for kind, moment in ((0, None), (0, 0), (1, 1), (2, 2)):
        compile_owner(tables(0, kind), moment)
    compile_owner(tables(0, 0, values=0), None)


def main() -> None:
    # AMD's linker is not in every wheel; the assembly before it says all that is asked for here.
    os.environ.setdefault("TRITON_HIP_LLD_PATH", shutil.which("true") or "")
    names, found = sys.argv[1].split(","), {}
    if not names[0].isdigit():
        elements.FLUSHES = tl.constexpr(False)  # as with a torch for AMD's devices
    for number, name in enumerate(names):
        target = Target(name, number)
        triton.runtime.driver.set_active(target)
        launch.launch = target.launch
        compile_all()
        found[name] = target.found
    print(json.dumps({"triton": triton.__version__, "targets": found}))


if __name__ == "__main__":
    main()
