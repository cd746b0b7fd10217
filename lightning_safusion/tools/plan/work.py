"""What the kernels of a buffer cost a device: launches, bytes and instructions, counted, as functions of its size.

Bytes are sectors of 32 that a kernel moves between the device and its memory, counted from its own loads and stores
(``tests/kernels/cuda/test_traffic.py``). Instructions are those of the loops of the compiled code, branches that are
not taken included, and of what a program does once (``tests/kernels/cuda/test_launches.py``); each is counted once for
every thread. Launches are those of a window on a device that is not there (``tests/fusion/test_fused_budgets.py``). The
tests hold the numbers to what the kernels do. How long it takes is for a device to say:
:class:`lightning_safusion.tools.plan.device.Device`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log, log2
from typing import NamedTuple

from lightning_safusion.kernels.cuda.tables import CHUNKS, SHARING, TILE, WIDTH, digits_of, listed

#: What a device does for a window, by the names of the kernels; ``"zero"`` clears their memory, ``"copy"`` brings the
#: verdict to the host, ``"operations"`` are PyTorch's, where these kernels do not serve.
STAGES = (
    "zero", "compensate", "count_rest", "share", "collect", "narrow", "count_chunks", "write", "pack", "reduce",
    "decode", "commit", "copy", "operations",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a stage costs."""

    launches: float = 0.0  # kernels that are started
    nbytes: float = 0.0  # that move between the device and its memory
    instructions: float = 0.0  # each counted once for every thread

    def __add__(self, other: Work) -> Work:
        """Both."""
        return Work(self.launches + other.launches, self.nbytes + other.nbytes, self.instructions + other.instructions)


class Loop(NamedTuple):
    """Compiled code of a kernel for compute capability 9.0: the longer of what Triton 3.6 and 3.9 make."""

    # instructions of its longest loop that has no other in it, which all threads of a program run; of "write", which
    # looks through regions in a loop, those of all loops
    length: int
    once: int  # instructions in no loop, which each program runs once, or not where a branch leads past them
    threads: int  # of a program
    items: int  # elements, entries (pack: of a program) or bits that all threads treat in a pass of the loop

    def instructions(self, items: float, programs: float) -> float:
        """Of so many items, cut evenly among programs."""
        return self.threads * (self.length * items / self.items + self.once * programs)


#: By kernel; "by update": where moments of the optimizer are read. Items of ``"narrow"``, ``"count_chunks"`` and
#: ``"write"`` are candidates.
LOOPS: dict[str, Loop] = {
    "compensate": Loop(140, 157, 128, 512),
    "compensate by update": Loop(317, 291, 128, 512),
    "count_rest": Loop(138, 86, 128, 1024),
    "collect": Loop(257, 651, 128, 1024),
    "narrow": Loop(148, 452, 128, 512),
    "count_chunks": Loop(57, 519, 128, 512),
    "write": Loop(684, 317, 32, 128),
    "pack": Loop(73, 395, 128, 512),
    "decode": Loop(279, 489, 128, 256),
    "decode of owners": Loop(264, 635, 128, 256),
    "reduce": Loop(274, 211, 128, 256),
    "reduce by update": Loop(267, 378, 128, 256),
    "commit": Loop(215, 327, 128, 256),
    "place": Loop(115, 456, 128, 256),
    "count_above": Loop(107, 118, 256, 2048),
    "add_up": Loop(83, 205, 128, 1024),
}
# Instructions of each thread in their other loops: for each message of a tile, for bits of its region that are passed
# over, for each header, and for 512 elements: cleared; delivered; added to the residual of an owner, and compared by
# update; added to what an owner keeps.
_RANK, _SKIPPED, _FLAG, _PIECE = 81, 43, 5, 512
_CLEARED, _DELIVERED, _HELD, _KEPT = 21, 69, {False: 87, True: 256}, 44
# Buckets of a region of positions, and bits that are read together.
_REGION, _BITS = 512, 256
# Bytes of a sector, and fields of a message in which a program reads some bytes between others.
_SECTOR, _FIELDS = 32, 5
# Elements that have the first digit of the limit and are not sent, for each that is and each e-fold of the density (of
# normal numbers); bytes of a candidate, its place and its key; instructions for a region in which entries are counted.
_MORE, _LISTED, _RANKED = 0.08, 8, 57
# Of writing entries: bytes of one between two kernels, which one writes and the other reads; and those with a scale.
_ENTRY, _PART = 8, 128


@dataclass(frozen=True)
class Span:
    """A buffer."""

    elements: float
    entries: float  # that it sends
    tensors: float = 1  # in it, or pieces of them
    by_update: bool = False  # elements are compared by how far the optimizer would move them
    pooled: bool = False  # its tensors share a part of their quotas
    messages: int = 1  # among which its entries are divided
    bits: int = 4  # of a value in a message; those of 4 have scales

    @property
    def low_bits(self) -> int:
        """Bits of a position in its bucket: those with which positions take the fewest."""
        return min(range(25), key=lambda low: low * self.entries + self.elements / 2**low)

    @property
    def chunks(self) -> float:
        """Programs that read all elements."""
        width = ceil(self.elements / (CHUNKS * WIDTH)) * WIDTH or WIDTH
        return max(self.tensors, self.elements / width + self.tensors / 2)  # the last one of a tensor is half full

    @property
    def digits(self) -> tuple[int, ...]:
        """Bits of the digits of a key."""
        return digits_of(self.elements, self.tensors)

    @property
    def candidates(self) -> float:
        """Elements that are read again when the first digit of the limit is known."""
        if not listed(self.digits):
            return self.elements
        share = min(1.0, self.entries / self.elements)
        return self.elements * share * (1 - _MORE * log(max(share, 1e-9)))

    def again(self, kernel: str, once: bool = True) -> float:
        """Instructions of reading the candidates of all chunks; ``once``: with those of a program."""
        loop = LOOPS[kernel]
        passes = ceil(self.candidates / self.chunks / loop.items)
        return loop.threads * (loop.length * passes + loop.once * once) * self.chunks

    @property
    def message(self) -> float:
        """Bytes of positions and values."""
        return self.entries * self.low_bits / 8 + self.high + self._values

    @property
    def read(self) -> float:
        """Bytes of a message that its readers move: all programs of a region read all of its high bits."""
        (blocks, own), programs = self._blocks, max(1.0, self.region / TILE)
        low = self.entries * self.low_bits / 8 * (own / blocks) * programs
        return self.high * programs + low + self._values + _FIELDS * _SECTOR * self.tiles

    @property
    def region(self) -> float:
        """Elements of a region of positions, which has those of one tensor."""
        return min(float(_REGION << self.low_bits), self.elements / self.tensors)

    @property
    def high(self) -> float:
        """Bytes of the high bits of positions."""
        return (self.entries + self.elements / 2**self.low_bits) / 8

    @property
    def _values(self) -> float:
        return self.entries * (self.bits + (16 / _PART if self.bits == 4 else 0)) / 8

    @property
    def tiles(self) -> float:
        """Programs that read messages."""
        return max(self.tensors, self.elements / min(TILE, _REGION << self.low_bits) + self.tensors / 2)

    @property
    def weighed(self) -> float:
        """Bytes of an element's key that is written and of the moment that it is made from."""
        return 8.0 if self.by_update else 0.0

    @property
    def touched(self) -> float:
        """Share of the sectors of eight elements with an entry among them."""
        return 1 - (1 - min(1.0, self.entries / max(self.elements, 1.0))) ** 8

    @property
    def _blocks(self) -> tuple[float, float]:
        """Of 256 bits: those of a region, and those of them that have bits of a tile."""
        bits = self.region / 2**self.low_bits + self.region * self.entries / self.elements
        blocks = ceil(bits / _BITS)
        return blocks, min(blocks, bits / _BITS * TILE / self.region + 1) if self.region > TILE else blocks

    def reading(self, kernel: str) -> float:
        """Instructions of reading the entries of one message: every program looks through its region, 256 bits at a
        time, and reads those that concern its tile."""
        loop, (blocks, own) = LOOPS[kernel], self._blocks
        return loop.threads * (loop.length * own + _SKIPPED * (blocks - own)) * self.tiles


def selection(span: Span) -> dict[str, Work]:
    """From gradients to a message: launches, bytes and instructions of each stage."""
    return {"zero": zeros(span), "compensate": compensation(span)} | packing(span)


def estimation(span: Span, counts: int) -> Work:
    """Of a threshold for each tensor: moments, and elements counted above so many; and above the one that is taken.

    Operations on one number of each tensor are not in it.
    """
    passes, n = counts + 1, span.elements
    counted = LOOPS["count_above"].instructions(n, span.chunks)
    return Work(1 + passes, 4 * n * (1 + passes), LOOPS["add_up"].instructions(n, span.chunks) + passes * counted)


def placement(span: Span) -> dict[str, Work]:
    """From elements that are chosen, and gradients that are added, to a message."""
    k, loop = span.entries, LOOPS["place"]
    # each is looked up among tensors, and each region among them: a pass of the loop halves what is left
    halvings = 2 * ceil(log2(max(2.0, k, span.tensors)))
    placed = loop.threads * (loop.once + loop.length * halvings) * ceil(k / loop.items)
    return {
        "zero": Work(2, 4 * k / _PART + span.message),
        "compensate": compensation(replace(span, by_update=False)),
        "write": Work(1, (12 + _ENTRY) * k + span.message, placed),
        "pack": packing(span)["pack"],
    }


def zeros(span: Span) -> Work:
    """Histograms of all tensors, and the largest magnitudes of parts, are cleared."""
    first, *others = (1 << bits for bits in span.digits)
    return Work(
        1, 4 * (first * max(span.tensors, span.chunks / SHARING) + sum(others) * span.tensors + span.entries / _PART)
    )


def compensation(span: Span) -> Work:
    """Gradients are added to the residual; keys are written where they are not the elements."""
    added = LOOPS["compensate by update" if span.by_update else "compensate"]
    return Work(1, (12 + span.weighed) * span.elements, added.instructions(span.elements, span.chunks))


def packing(span: Span) -> dict[str, Work]:
    """From keys to messages; nothing for one worker, which has nobody to send to."""
    if not span.elements:
        return {}
    n, k, c = span.elements, span.entries, span.candidates
    levels = len(span.digits) - 1
    told = _LISTED * c if listed(span.digits) else 0.0
    counted = LOOPS["collect"].instructions(n, span.chunks) + span.again("narrow", once=False)
    work = {
        # its loop runs in windows in which a limit falls far
        "count_rest": Work(0.0 if span.pooled else 1.0, 0, LOOPS["count_rest"].instructions(0, span.chunks)),
        "share": Work(levels + 1 if span.pooled else 1.0),
        "collect": Work(1, 4 * n + told + span.high, counted),
        "narrow": Work(levels - 1, (levels - 1) * 4 * c, (levels - 1) * span.again("narrow")),
        "count_chunks": Work(1, 4 * c, span.again("count_chunks")),
    }
    written = span.again("write") + LOOPS["write"].threads * _RANKED * n / (_REGION << span.low_bits)
    work["write"] = Work(1, max(told, 4 * c) + 4 * n * span.touched + _ENTRY * k + span.message, written)
    packed = LOOPS["pack"]
    programs = span.messages * ceil(k / span.messages / packed.items)
    per_program = packed.threads * (packed.length * span.low_bits + packed.once)
    work["pack"] = Work(1, _ENTRY * k + span.message, per_program * programs)
    return work


def decoding(span: Span, workers: int) -> dict[str, Work]:
    """From the messages of all workers to means in the gradients."""
    return {"decode": delivery("decode", span, workers, workers)}


def delivery(kernel: str, span: Span, messages: int, headers: int) -> Work:
    """Means into gradients: every program reads so many messages, and of each header whether its tensor is finite."""
    loop, delivered = LOOPS[kernel], (_CLEARED + _DELIVERED) * span.elements / _PIECE
    delivered += (loop.once + _FLAG * headers) * span.tiles
    nbytes = 4 * span.elements + messages * span.read + headers * _SECTOR * span.tiles
    return Work(1, nbytes, loop.threads * delivered + messages * _added(kernel, span))


def _added(kernel: str, span: Span) -> float:
    """Instructions of adding up one message."""
    return span.reading(kernel) + LOOPS[kernel].threads * _RANK * span.tiles


def commitment(span: Span) -> dict[str, Work]:
    """What was sent leaves the residual: the part of a buffer in the launch that ends the window of all."""
    if not span.elements:
        return {}
    once = LOOPS["commit"].threads * LOOPS["commit"].once * span.tiles
    return {"commit": Work(0, 8 * span.elements * span.touched + span.read, span.reading("commit") + once)}


def reduction(arriving: Span, others: int) -> Work:
    """Of an owner: the messages of others are added up, and to that its residual; both are kept, and keys where they
    differ."""
    kernel, n = "reduce by update" if arriving.by_update else "reduce", arriving.elements
    held = (_CLEARED + _HELD[arriving.by_update]) * n / _PIECE + LOOPS[kernel].once * arriving.tiles
    nbytes = (12 + arriving.weighed) * n + others * arriving.read
    return Work(1, nbytes, LOOPS[kernel].threads * held + others * _added("reduce", arriving))


def keeping(owned: Span) -> Work:
    """Of an owner: what others have sent is added to the residual of its shard, less what it delivers."""
    loop, kept = LOOPS["commit"], 12 * owned.elements + 4 * owned.elements * owned.touched
    added = loop.threads * (loop.once * owned.tiles + _KEPT * owned.elements / _PIECE)
    return Work(0, kept + owned.read, owned.reading("commit") + added)


#: The launches that end a window, whatever its buffers.
END = {"commit": Work(1), "copy": Work(1)}
