"""From gradients to means on a device: what each way costs it, in launches, bytes and instructions.

The fused kernels are counted in :mod:`lightning_safusion.tools.plan.work`. Where they do not serve, the engine uses
PyTorch's operations; their launches and bytes are counted here, on a device that is not there
(``tests/tools/plan/test_paths.py``): an operation reads and writes each of its tensors once, a sort reads and writes
keys and positions once for every 8 bits of a key, and of what is chosen by positions only that much moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from lightning_safusion.tools.plan import work as fused
from lightning_safusion.tools.plan.work import Span, Work


class Operations(NamedTuple):
    """Operations of PyTorch on a buffer: launches of a call, bytes for each element and each entry, launches for each
    tensor."""

    launches: int
    nbytes: float
    entry_bytes: float
    tensor_launches: int = 0

    def work(self, elements: float, entries: float, tensors: float = 0, calls: int = 1) -> Work:
        """Of some calls, with so many elements and entries in all."""
        launches = self.launches * calls + self.tensor_launches * tensors
        return Work(launches, self.nbytes * elements + self.entry_bytes * entries)


#: Gradients are added to the residual, and elements are selected from it: all are sorted.
SELECT = {"topk": Operations(31, 401, 82, 2), "gaussiank": Operations(258, 896, 108, 2)}
#: Positions that do not depend on elements come from the host; their values are read.
DRAW = Operations(3, 0, 32)
#: A threshold is worked out from moments, and refined so many times, in numbers of each tensor.
ESTIMATE, REFINEMENTS = Operations(126, 0, 0), 8
#: A message is written; with values of a few bits, or floats.
ENCODE = {True: Operations(99, 1.1, 587), False: Operations(67, 1.1, 402)}
#: A message of one worker is read and added to the means.
DECODE = {True: Operations(51, 1.2, 563), False: Operations(32, 1.2, 457)}
#: Means are cleared before, judged, and written into the gradients.
DELIVER = Operations(25, 42, 0)
#: What was sent leaves the residual.
COMMIT = Operations(4, 0, 28)


class Path(ABC):
    """A way from gradients to means. All return work by stage, as :data:`~lightning_safusion.tools.plan.work.STAGES`
    has them, for a buffer that is not empty."""

    #: Of a window, whatever its buffers.
    end: ClassVar[Mapping[str, Work]] = {"operations": Work(1)}

    @abstractmethod
    def selection(self, span: Span) -> dict[str, Work]:
        """From gradients to a message."""

    @abstractmethod
    def decoding(self, span: Span, messages: int) -> dict[str, Work]:
        """From so many messages, each with the entries of the span, to means in the gradients."""

    @abstractmethod
    def commitment(self, span: Span) -> dict[str, Work]:
        """What was sent leaves the residual."""


@dataclass(frozen=True)
class FusedKernels(Path):
    """The kernels of whole buffers. ``"topk"`` is all theirs. In PyTorch's operations ``"gaussiank"`` estimates a
    threshold, and others choose elements: those of ``"randomk"``, or of ``"topk"``."""

    bits: int = 4  # of a value in a message
    compressor: str = "topk"
    end = fused.END

    def selection(self, span: Span) -> dict[str, Work]:
        n, k, span = span.elements, span.entries, replace(span, bits=self.bits)
        if self.compressor == "topk":
            return fused.selection(span)
        if self.compressor == "gaussiank":
            estimate = ESTIMATE.work(n, k) + fused.estimation(span, REFINEMENTS)
            return fused.selection(span) | {"operations": estimate}
        operations = DRAW if self.compressor == "randomk" else SELECT["topk"]
        return fused.placement(span) | {"operations": operations.work(n, k, span.tensors)}

    def decoding(self, span: Span, messages: int) -> dict[str, Work]:
        return fused.decoding(replace(span, bits=self.bits), messages)

    def commitment(self, span: Span) -> dict[str, Work]:
        return fused.commitment(replace(span, bits=self.bits))


@dataclass(frozen=True)
class FusedShards(Path):
    """The same kernels where all tensors of a buffer are cut into a piece for each worker, which owns it: it adds up
    what it receives, and selects from the sums."""

    workers: int  # each owns a shard
    scattered: float  # entries that a worker selects, for each of its quota; those of its own shard are not sent
    gathered: float  # entries that all owners deliver, for each of the quota
    bits: int = 4  # of a value in a message
    end = fused.END

    def _part(self, span: Span, shards: int, entries: float, messages: int = 1) -> Span:
        """Some shards, with so many entries for each of the quota."""
        share, tensors = shards / self.workers, shards * span.tensors
        sent = min(entries * span.entries, span.elements) * share
        cut = replace(span, elements=share * span.elements, entries=sent, tensors=tensors)
        return replace(cut, messages=messages, bits=self.bits)

    def _sent(self, span: Span) -> Span:
        """What a worker selects in the shards of others; its own message has only a header."""
        return self._part(span, self.workers - 1, self.scattered, self.workers)

    def selection(self, span: Span) -> dict[str, Work]:
        pieces = replace(span, tensors=self.workers * span.tensors, bits=self.bits)
        return {"zero": fused.zeros(pieces), "compensate": fused.compensation(pieces)} | fused.packing(self._sent(span))

    def decoding(self, span: Span, messages: int) -> dict[str, Work]:
        """From the messages of others to sums, from these to what is delivered, and from that to means."""
        owned, arriving = self._part(span, 1, self.gathered), self._part(span, 1, self.scattered)
        gathered = self._part(span, self.workers, self.gathered)
        reduced = {"zero": fused.zeros(owned), "reduce": fused.reduction(arriving, self.workers - 1)}
        means = fused.delivery("decode of owners", gathered, 1, self.workers)
        return reduced | fused.packing(owned) | {"decode": means}

    def commitment(self, span: Span) -> dict[str, Work]:
        sent = fused.commitment(self._sent(span)).get("commit", Work())  # one worker sends nothing
        return {"commit": sent + fused.keeping(self._part(span, 1, self.gathered))}


@dataclass(frozen=True)
class TorchOperations(Path):
    """PyTorch's operations; those of a compressor that were not counted are taken for those of ``"topk"``."""

    compressor: str = "topk"
    few_bits: bool = False

    def selection(self, span: Span) -> dict[str, Work]:
        select = SELECT.get(self.compressor, SELECT["topk"]).work(span.elements, span.entries, span.tensors)
        return {"operations": select + ENCODE[self.few_bits].work(span.elements, span.entries)}

    def decoding(self, span: Span, messages: int) -> dict[str, Work]:
        read = DECODE[self.few_bits].work(messages * span.elements, messages * span.entries, calls=messages)
        return {"operations": read + DELIVER.work(span.elements, span.entries)}

    def commitment(self, span: Span) -> dict[str, Work]:
        return {"operations": COMMIT.work(span.elements, span.entries)}
