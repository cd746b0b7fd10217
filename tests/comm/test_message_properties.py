"""Messages of every wire format, of selections that Hypothesis makes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import available_wires, resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.native import FoundSelection
from lightning_safusion.testing import FINITE, KINDS, values_of
from tests.comm.test_damaged import codec_of, outcome
from tests.sparsify.oracle import kernels

EXPLICIT = [wire for wire in available_wires() if "-" in wire]
#: Every layout, with floats and with values of a few bits.
FAMILIES: dict[str, list[str]] = {}
for _wire in EXPLICIT:
    _layout, _, _values = _wire.partition("-")
    FAMILIES.setdefault(f"{_layout}-{'float' if 'p' in _values or _values == 'bf16' else 'few-bits'}", []).append(_wire)
each_family = pytest.mark.parametrize("wires", FAMILIES.values(), ids=list(FAMILIES))
# around bytes and words of a bitmap, and regions
NUMELS = [0, 1, 7, 31, 32, 33, 255, 257, 1000, 65_535, 65_537]
Case = tuple[Codec, Selection]


@st.composite
def messages(draw: st.DrawFn, wires: list[str], kinds: list[str] = KINDS) -> Case:
    """A format of a span of some tensors, and a selection that fits."""
    numel = draw(st.sampled_from(NUMELS))
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    capacity = draw(st.sampled_from([numel, numel // 2, numel // 10, numel // 300]))
    count = draw(st.sampled_from([capacity, capacity // 2, min(1, capacity), 0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    indices = np.sort(rng.choice(numel, count, replace=False)) if numel else np.zeros(0, np.int64)
    values = values_of(draw(st.sampled_from(kinds)), count, rng)
    if draw(st.booleans()):  # far too large, and far too small, for 16 bits
        values = values * np.float32(10.0) ** rng.integers(-30, 30, count).astype(np.float32)
    selection = Selection(torch.from_numpy(indices), torch.from_numpy(values.astype(np.float32)), count)
    wire, edges = draw(st.sampled_from(wires)), (0, *cuts, numel)
    entries = np.diff(indices.searchsorted(edges))
    entries[np.argmax(np.diff(edges))] += capacity - count
    known = entries.tolist() if draw(st.booleans()) else None
    return resolve_codec(wire, numel, capacity, torch.float32, edges, known), selection


def encoded(codec: Codec, selection: Selection, garbage: int) -> tuple[Tensor, Tensor]:
    """The message, and what receivers are said to decode."""
    out = torch.full((codec.nbytes,), garbage, dtype=torch.uint8)
    return out, codec.encode(selection, out)


def padded(selection: Selection, capacity: int) -> Selection:
    """The same selection as an accelerator gives it: of a fixed length, with the count in a tensor."""
    extra = capacity - len(selection.indices)
    anywhere = selection.indices[:1] if len(selection.indices) else torch.zeros(1, dtype=torch.int64)
    indices = torch.cat([selection.indices, anywhere.expand(extra)])
    values = torch.cat([selection.values, torch.zeros(extra)])
    return Selection(indices, values, torch.tensor([len(selection.indices)]))


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def spread(codec: Codec, indices: Tensor, values: Tensor) -> Tensor:
    """The dense span that entries are added to; padding adds 0."""
    return torch.zeros(codec.numel).index_add_(0, indices, values)


@each_family
@settings(max_examples=15)  # of each family
@given(data=st.data())
def test_what_was_sent_arrives(wires: list[str], data: st.DataObject) -> None:
    codec, selection = data.draw(messages(wires))
    message, sent = encoded(codec, selection, 255)
    assert codec.nbytes % 4 == 0
    indices, values = codec.decode(message)
    assert torch.equal(indices, selection.indices)
    same(values, sent)
    if codec.name.endswith("-fp32"):
        same(sent, selection.values)
    padded_indices, padded_values = codec.decode_padded(message)
    assert len(padded_indices) == codec.capacity
    assert bool(((padded_indices >= 0) & (padded_indices < max(1, codec.numel))).all())
    same(spread(codec, padded_indices, padded_values), spread(codec, indices, values))
    with native.unused():
        for ours, theirs in zip(codec.decode(message), (indices, values), strict=True):
            same(ours, theirs)
    # in pieces of any size, in any order
    cuts = sorted(data.draw(st.lists(st.integers(0, codec.numel), max_size=5)))
    pieces = data.draw(st.permutations(list(pairwise([0, *cuts, codec.numel]))))
    for compiled in (True, False):
        with kernels(compiled):
            read = codec.reader(message)
            for start, stop in pieces:
                inside = (indices >= start) & (indices < stop)
                found, part = read(start, stop)
                assert torch.equal(found, indices[inside])
                same(part, values[inside])


@each_family
@settings(max_examples=15)
@given(data=st.data())
def test_a_selection_has_one_message(wires: list[str], data: st.DataObject) -> None:
    """Whoever encodes it, from whatever positions, into whatever lay there before."""
    codec, selection = data.draw(messages(wires, [*FINITE, "infinities"]))
    message, sent = encoded(codec, selection, 0)
    found = FoundSelection(selection.indices.int(), selection.values)
    others = [selection, found, padded(selection, codec.capacity)]
    for compiled in (True, False):
        with kernels(compiled):
            for other in others:
                again, told = encoded(codec, other, 255)
                assert torch.equal(again, message)
                same(told[: len(sent)], sent)
                assert not told[len(sent) :].any()


@st.composite
def damaged(draw: st.DrawFn, codec: Codec) -> Tensor:
    """A message of which bits, bytes and whole parts were changed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(0, codec.capacity))
    indices = torch.from_numpy(np.sort(rng.choice(codec.numel, count, replace=False)))
    message, _ = encoded(codec, Selection(indices, torch.randn(count), count), 0)
    header = codec.field_bytes[0]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["bit", "byte", "header", "rest", "all", "fill"]))
        first, last = {"header": (0, header), "rest": (header, codec.nbytes)}.get(kind, (0, codec.nbytes))
        place = draw(st.one_of(st.integers(0, header - 1), st.integers(0, codec.nbytes - 1)))
        if kind == "bit":
            message[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte":
            message[place] = draw(st.integers(0, 255))
        elif kind == "fill":
            message[:] = draw(st.sampled_from([0, 1, 127, 128, 255]))
        else:
            message[first:last] = torch.from_numpy(rng.integers(0, 256, last - first, dtype=np.uint8))
    return message


@each_family
@given(data=st.data())
def test_damaged_messages_are_refused_alike_or_read_in_bounds(wires: list[str], data: st.DataObject) -> None:
    codec = codec_of(data.draw(st.sampled_from(wires)))
    message = data.draw(damaged(codec))
    said = {compiled: outcome(codec, message.clone(), compiled) for compiled in (True, False)}
    assert all(text == "read" or text.endswith("it is damaged") for text in said.values()), said
    if any("room for" in text for text in said.values()):
        assert said[True] == said[False]


@given(wire=st.sampled_from(EXPLICIT), size=st.integers(0, 30_000))
def test_messages_of_another_size_are_refused(wire: str, size: int) -> None:
    codec = codec_of(wire)
    message = torch.zeros(size + (size == codec.nbytes), dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"uint8 \[{codec.nbytes}\], got torch.uint8 \[{len(message)}\]"):
        codec.decode(message)
