"""Ranks of regions in 16 and in 32 bits, against the CPU, byte for byte and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from lab.gpu.buffers import DECAY, DEVICE, Case, Rank, gather
from lightning_safusion.comm.exchange import Part, aligned
from lightning_safusion.comm.wire import elias_fano
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cuda import elements
from lightning_safusion.kernels.cuda.chosen import PlacedKernels
from lightning_safusion.kernels.cuda.window import WindowKernels
from lightning_safusion.sparsify.basic import TopK
from tests.kernels.cuda import buffers
from tests.kernels.cuda.buffers import Owner, differing, kernels_of

BORDER = 100  # for the interpreter and for NumPy: with the true one a message takes ten seconds in the interpreter


@pytest.fixture
def low_border(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type != "cpu":
        pytest.skip("a lower border")
    assert elements._NARROW_RANKS.value == elias_fano.NARROW_RANKS == 1 << 16
    monkeypatch.setattr(elements, "_NARROW_RANKS", tl.constexpr(BORDER))
    monkeypatch.setattr(elias_fano, "NARROW_RANKS", BORDER)
    with native.unused():
        yield


def of(capacity: int, density: float = 0.1) -> Rank:
    """One worker; its message has several regions, and an odd number of ranks or an even one."""
    other = int(density * 10)
    sizes = (int(np.ceil((capacity - other) / density)), 10)
    rank = Rank.of(Case(sizes, density, world_size=1, wire="fp16"), 0, 5)
    assert rank.kernels.tables.message.capacity == capacity
    return rank


def check(rank: Rank, narrow: bool) -> None:
    """What is selected, decoded and committed is what the CPU makes of it; damage is seen."""
    buffers.check(rank)
    gather([rank])
    mean = rank.mean()
    remaining, window = rank.left(mean), WindowKernels(DEVICE)
    rank.kernels.decode(DECAY, window.status)
    window.commit([rank.kernels])
    assert int(window.status) == 0
    assert differing(torch.cat(rank.grads), mean) == []
    assert differing(rank.memory, remaining) == []
    first = 4 * rank.kernels.tables.message.fields[0]
    rank.kernels.received[first + (2 if narrow else 4)] ^= 1  # the lowest bit of the second
    rank.kernels.decode(DECAY, window.status)
    assert int(window.status) == 1


@pytest.mark.usefixtures("low_border")
@pytest.mark.parametrize("capacity", [BORDER - 1, BORDER])
def test_what_is_selected_and_decoded(capacity: int) -> None:
    check(of(capacity), narrow=capacity < BORDER)


@pytest.mark.slow  # ten seconds in the interpreter
def test_the_largest_rank_of_16_bits() -> None:
    check(of((1 << 16) - 1, 0.9), narrow=True)


@pytest.mark.usefixtures("low_border")
@pytest.mark.parametrize("capacity", [BORDER - 1, BORDER])
def test_what_is_placed(capacity: int) -> None:
    rank = of(capacity)
    accumulated = rank.expected()[0]
    selection = TopK().select(accumulated, rank.case.segments, 0)
    rank.exchange.encode(accumulated, Part(selection, torch.ones(2, dtype=torch.uint8)))
    kernels = kernels_of(PlacedKernels, rank)
    kernels.sent.fill_(255)  # every byte is written
    kernels.locate(rank.grads, None)
    kernels.add(DECAY)
    kernels.place(selection)
    kernels.pack(0)
    assert differing(kernels.sent, rank.exchange.messages[0]) == []


@pytest.mark.parametrize("bits", [16, 32])
def test_messages_to_and_of_owners(request: pytest.FixtureRequest, bits: int) -> None:
    if bits == 32:
        request.getfixturevalue("low_border")
    owner = Owner(2, (2900, 100), 0.2)
    message = owner.tables.delivering.message
    assert 4 * (message.fields[1] - message.fields[0]) == aligned((int(message.runs.regions[-1]) + 1) * bits // 8, 16)
    owner.check()
