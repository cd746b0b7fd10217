"""What the compiler has made of the kernels on a device: registers, spills, and room on a multiprocessor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.gpu.figures import Figure, note
from lightning_safusion.kernels.cuda.launch import options_of, start

# Registers of a multiprocessor, and how many at a time a warp of 32 threads gets for each of its threads.
_REGISTERS, _ROUNDED = 65_536, 8


class Compiled:
    """Takes the place of a launch, and keeps what the compiler has made of every variant of a kernel."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        if programs == 0:
            return
        made = start(kernel, programs, arguments, constants)
        named = ", ".join(f"{name}={value}" for name, value in constants.items())
        self.found[f"{kernel.fn.__name__}[{named}]"] = made, 32 * options_of(kernel)["num_warps"]


def registers(compiled: Compiled) -> Iterator[Figure]:
    """Spills of all variants, and the fewest blocks of a multiprocessor by registers; nothing in the interpreter."""
    made = {name: (each, threads) for name, (each, threads) in compiled.found.items() if hasattr(each, "n_regs")}
    spilled = {name: each.n_spills for name, (each, _) in made.items() if each.n_spills}
    about = ", ".join(f"{name}: {count}" for name, count in spilled.items())
    yield Figure("variants of kernels that spill registers", len(spilled), most=0, note=about)
    blocks = {
        name: _REGISTERS // (-(-each.n_regs // _ROUNDED) * _ROUNDED * threads) for name, (each, threads) in made.items()
    }
    fewest = min(blocks, key=lambda name: blocks[name]) if blocks else ""
    yield Figure("blocks of a multiprocessor, the fewest", blocks.get(fewest, 0), least=2, note=fewest)
    about = "<br>".join(f"{name}: {each.n_regs}" for name, (each, _) in sorted(made.items()))
    yield note("variants compiled", len(compiled.found), about=about and f"registers: {about}")
