"""Ranks of regions in 16 and in 32 bits, against the CPU, byte for byte and bit for bit.

Covers: capacities at the border; what the selecting and the placing kernel write; means, what leaves the residual, and
    damage; messages to and of owners.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from lightning_safusion.comm.collectives.shard_tables import shard_tables
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.exchange import Part, SpanSpec, aligned
from lightning_safusion.comm.wire import elias_fano
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cuda import elements
from lightning_safusion.kernels.cuda.buffer import Workspace
from lightning_safusion.kernels.cuda.chosen import PlacedKernels
from lightning_safusion.kernels.cuda.owners import Mail, OwnerKernels
from lightning_safusion.sparsify.basic import TopK
from tests.comm.exchanges import Workers, gradients, sharded
from tests.kernels.cuda.buffers import DECAY, DEVICE, Case, Rank, WindowKernels, gather

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
    expected = rank.message(*rank.expected()).clone()
    assert np.flatnonzero(rank.run().cpu().numpy() != expected.numpy()).tolist() == []
    gather([rank])
    mean = rank.mean()
    remaining, window = rank.left(mean), WindowKernels(DEVICE)
    rank.kernels.decode(DECAY, window.status)
    window.commit([rank.kernels])
    assert int(window.status) == 0
    assert torch.equal(torch.cat([grad.cpu() for grad in rank.grads]), mean)
    assert torch.equal(rank.memory.cpu(), remaining)
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
    accumulated, segments = rank.expected()[0], rank.case.segments
    assert segments is not None
    selection = TopK().select(accumulated, segments, 0)
    rank.exchange.encode(accumulated, Part(selection, torch.ones(2, dtype=torch.uint8)))
    own = rank.kernels
    kernels = PlacedKernels(own.tables, rank.memory, own.sent, own.received, 0, Workspace(DEVICE))
    kernels.sent.fill_(255)  # every byte is written
    kernels.locate(rank.grads, None)
    kernels.add(DECAY)
    kernels.place(selection)
    kernels.pack(0)
    assert np.flatnonzero(kernels.sent.cpu().numpy() != rank.exchange.messages[0].numpy()).tolist() == []


@pytest.mark.parametrize("bits", [16, 32])
def test_messages_to_and_of_owners(request: pytest.FixtureRequest, bits: int) -> None:
    if bits == 32:
        request.getfixturevalue("low_border")
    sizes, numel = (2900, 100), 3000
    team = Workers(2, SpanSpec(numel, 600, (0, sizes[0], numel), ()), sharded("q4"))
    xs = gradients(2, numel)
    parts = [
        Part(TopK().select(x, exchange.segments, 0), torch.ones(2, dtype=torch.uint8))
        for x, exchange in zip(xs, team.exchanges, strict=True)
    ]
    mean, exchange = team.step(xs, parts)[1].mean, team.exchanges[1]
    assert isinstance(exchange, ShardedExchange)
    tables = shard_tables(exchange, np.zeros(2, np.int64))
    assert tables is not None
    assert tables.delivering is not None
    message = tables.delivering.message
    assert message.runs is not None
    assert 4 * (message.fields[1] - message.fields[0]) == aligned((int(message.runs.regions[-1]) + 1) * bits // 8, 16)
    memory, grads = torch.zeros(numel, device=DEVICE), [part.clone().to(DEVICE) for part in xs[1].split(sizes)]
    sending, arriving, sums, gathered, lane = (
        part.to(DEVICE)
        for part in (
            torch.full_like(exchange.sending, 255),
            exchange.arriving,
            torch.full_like(exchange.sums, 255),
            exchange.gathered_sums,
            exchange.lane.message,
        )
    )
    mail = Mail(sending, arriving.clone(), sums, gathered.clone(), lane, sum(exchange.out_sizes))
    kernels = OwnerKernels(tables, memory, mail, 1, Workspace(DEVICE), Workspace(DEVICE))
    kernels.locate(grads, None)
    kernels.select(1.0, None)
    kernels.pack(0)
    kernels.reduce()
    window = WindowKernels(DEVICE)
    kernels.decode(1.0, window.status)
    window.commit([kernels])
    assert int(window.status) == 0
    assert torch.equal(mail.sending.cpu(), exchange.sending)
    assert torch.equal(mail.delivering.cpu(), exchange.sums)
    assert torch.equal(torch.cat(grads).cpu(), mean)
