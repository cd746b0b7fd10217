"""What the kernels of a buffer cost a device: launches, bytes and instructions, counted, as functions of its size.

Bytes are sectors of 32 that a kernel moves between the device and its memory, counted from its own loads and stores
(``tests/kernels/cuda/test_traffic.py``). Instructions are those of the loops of the compiled code, branches that are
not taken included, and of what a program does once (``tests/kernels/cuda/test_launches.py``); each is counted once for
every thread. Launches are those of a window on a device that is not there (``tests/fusion/test_fused_budgets.py``). The
tests hold the numbers to what the kernels do. How long it takes is for a device to say:
:class:`lightning_safusion.simulate.device.Device`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from lightning_safusion.kernels.cuda.tables import CHUNKS, TILE, WIDTH

#: What a device does for a window, by the names of the kernels; ``"zero"`` clears their memory, ``"copy"`` brings the
#: verdict to the host, ``"operations"`` are PyTorch's, where these kernels do not serve.
STAGES = (
    "zero", "compensate", "share", "narrow", "count_chunks", "write", "pack", "decode", "commit", "copy", "operations",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a stage costs.

    Args:
        launches: Kernels that are started.
        nbytes: Bytes that move between the device and its memory.
        instructions: Each counted once for every thread.
    """

    launches: float = 0.0
    nbytes: float = 0.0
    instructions: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both."""
        return Work(self.launches + other.launches, self.nbytes + other.nbytes, self.instructions + other.instructions)


class Loop(NamedTuple):
    """Compiled code of a kernel for compute capability 9.0, by Triton 3.9.

    Args:
        length: Instructions of its longest loop that has no other in it, which all threads of a program run.
        once: Those in no loop, which each program runs once, or not where a branch leads past them.
        threads: Of a program.
        items: Elements, entries (pack: of a program) or bits that all threads treat in a pass of the loop.
    """

    length: int
    once: int
    threads: int
    items: int

    def instructions(self, items: float, programs: float) -> float:
        """Of so many items, cut evenly among programs."""
        return self.threads * (self.length * items / self.items + self.once * programs)


#: By kernel; ``"compensate by update"`` where moments of the optimizer are read, the mean of both for ``"narrow"``.
LOOPS: dict[str, Loop] = {
    "compensate": Loop(266, 149, 128, 1024),
    "compensate by update": Loop(632, 287, 128, 1024),
    "narrow": Loop(531, 347, 128, 2048),
    "count_chunks": Loop(122, 637, 256, 2048),
    "write": Loop(823, 229, 128, 1024),
    "pack": Loop(70, 532, 128, 512),
    "decode": Loop(253, 414, 128, 256),
    "commit": Loop(244, 313, 128, 256),
}
# Of decode: instructions of each thread for each rank of a tile, and for 512 elements of it, cleared and delivered.
_RANK, _PIECE, _DELIVERED = 68, 512, 21 + 69
# Buckets of a region of positions.
_REGION = 512
# Of writing entries: bytes of one between two kernels, which one writes and the other reads.
_ENTRY = 8


@dataclass(frozen=True)
class Span:
    """A buffer.

    Args:
        elements: In it.
        entries: That it sends.
        tensors: In it.
        dtypes: Of its gradients, how many different ones.
        width: Bytes of an element of a gradient.
        by_update: Elements are compared by how far the optimizer would move them.
        pooled: Its tensors share a part of their quotas.
    """

    elements: float
    entries: float
    tensors: int = 1
    dtypes: int = 1
    width: int = 4
    by_update: bool = False
    pooled: bool = False

    @property
    def low_bits(self) -> int:
        """Bits of a position in its bucket: those with which positions take the fewest."""
        return min(range(25), key=lambda low: low * self.entries + self.elements / 2**low)

    @property
    def chunks(self) -> float:
        """Programs that read all elements."""
        width = ceil(self.elements / (CHUNKS * WIDTH)) * WIDTH or WIDTH
        return self.elements / width + self.tensors / 2  # the last one of a tensor is half full

    @property
    def message(self) -> float:
        """Bytes of positions and values of four bits, with a scale for 128."""
        return self._positions + self._values

    @property
    def read(self) -> float:
        """Bytes of a message that its readers move: all programs of a region read all of its positions."""
        return self._positions * max(1.0, (_REGION << self.low_bits) / TILE) + self._values

    @property
    def _positions(self) -> float:
        return (self.entries * (1 + self.low_bits) + self.elements / 2**self.low_bits) / 8

    @property
    def _values(self) -> float:
        return self.entries * (4 + 16 / 128) / 8

    @property
    def tile(self) -> float:
        """Elements of a program that reads messages."""
        return float(min(TILE, _REGION << self.low_bits))

    @property
    def touched(self) -> float:
        """Share of the sectors of eight elements with an entry among them."""
        return 1 - (1 - min(1.0, self.entries / max(self.elements, 1.0))) ** 8

    def reading(self, kernel: str) -> float:
        """Instructions of reading the entries of one message: every program reads its region, 256 bits at a time."""
        loop, tiles = LOOPS[kernel], self.elements / self.tile + self.tensors / 2
        region = min(float(_REGION << self.low_bits), self.elements / self.tensors)
        bits = region / 2**self.low_bits + region * self.entries / self.elements
        return loop.threads * loop.length * ceil(bits / loop.items) * tiles


def selection(span: Span) -> dict[str, Work]:
    """From gradients to a message: launches, bytes and instructions of each stage; none where there is nothing."""
    n, k, chunks = span.elements, span.entries, span.chunks
    if not n:
        return {}
    added = LOOPS["compensate by update" if span.by_update else "compensate"]
    # a key is written where it is not the element; where entries are, the element is then read beside it
    weighed = 8.0 if span.by_update else 0.0
    work = {
        "zero": Work(1),
        "compensate": Work(span.dtypes, (8 + span.width + weighed) * n, added.instructions(n, chunks)),
        "share": Work(3 if span.pooled else 0),
        "narrow": Work(2, 2 * 4 * n, 2 * LOOPS["narrow"].instructions(n, chunks)),
        "count_chunks": Work(1, 4 * n, LOOPS["count_chunks"].instructions(n, chunks)),
    }
    values = 4 * n * span.touched if span.by_update else 0.0
    work["write"] = Work(1, 4 * n + values + _ENTRY * k + span.message, LOOPS["write"].instructions(n, chunks))
    packed = LOOPS["pack"]
    per_program = packed.threads * (packed.length * span.low_bits + packed.once)
    work["pack"] = Work(1, _ENTRY * k + span.message, per_program * k / packed.items)
    return work


def decoding(span: Span, workers: int) -> dict[str, Work]:
    """From the messages of all workers to means in the gradients."""
    if not span.elements:
        return {}
    loop, tiles = LOOPS["decode"], span.elements / span.tile + span.tensors / 2
    delivered = loop.threads * (_DELIVERED * span.elements / _PIECE + loop.once * tiles)
    each = span.reading("decode") + loop.threads * _RANK * tiles
    moved = span.width * span.elements + workers * span.read
    return {"decode": Work(span.dtypes, moved, delivered + workers * each)}


def commitment(span: Span) -> dict[str, Work]:
    """What was sent leaves the residual: the part of a buffer in the launch that ends the window of all."""
    if not span.elements:
        return {}
    once = LOOPS["commit"].threads * LOOPS["commit"].once * (span.elements / span.tile + span.tensors / 2)
    return {"commit": Work(0, 8 * span.elements * span.touched + span.read, span.reading("commit") + once)}


#: The launches that end a window, whatever its buffers.
END = {"commit": Work(1), "copy": Work(1)}
