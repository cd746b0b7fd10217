"""Buffers for the tests of the kernels (:mod:`lab.gpu.buffers`), drawn by Hypothesis; what the CPU makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lab.gpu.buffers import DEVICE, Case, Rank
from lightning_safusion.comm.collectives.shard_tables import shard_tables
from lightning_safusion.comm.exchange import Part, SpanSpec
from lightning_safusion.kernels.cuda.buffer import BufferKernels, Weighing
from lightning_safusion.kernels.cuda.owners import Mail, OwnerKernels
from lightning_safusion.kernels.cuda.packer import Workspace
from lightning_safusion.kernels.cuda.window import WindowKernels
from lightning_safusion.sparsify.basic import TopK
from tests.comm.exchanges import Workers, gradients, sharded

Kernels = TypeVar("Kernels", bound=BufferKernels)

SIZES = st.sampled_from([1, 2, 7, 31, 32, 33, 127, 128, 129, 500, 511, 512, 513, 1023, 1025, 2047, 2049, 3000, 4097])


@st.composite
def cases(draw: Any, values: Sequence[str] = ("normal", "ties", "zeros", "one", "subnormal")) -> Case:
    """Buffers of up to six tensors."""
    sizes = tuple(draw(st.lists(SIZES, min_size=1, max_size=6)))
    dense = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) // 2))
    kinds = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=len(sizes), max_size=len(sizes))))
    density = draw(st.sampled_from([0.3, 0.1, 0.1, 0.02, 0.003]))
    pooled, wire = draw(st.booleans()), draw(st.sampled_from(["q4", "q4", "fp32", "bf16", "fp16"]))
    return Case(sizes, density, pooled, frozenset(dense), kinds, draw(st.sampled_from(list(values))), wire=wire)


#: Seeds of the order of programs; None: as the interpreter has them.
ORDERS = st.none() | st.integers(0, 1000)


@contextmanager
def in_order(seed: int | None) -> Iterator[None]:
    """The interpreter runs the programs of every grid in an order that is drawn from a seed."""
    interpreter = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    place = interpreter.set_grid_idx

    def shuffled(x: int, y: int, z: int) -> None:
        programs = interpreter.grid_dim[0]
        place(int(np.random.default_rng([seed or 0, programs]).permutation(programs)[x]), y, z)

    with pytest.MonkeyPatch.context() as patched:
        if seed is not None:
            patched.setattr(interpreter, "set_grid_idx", shuffled)
        yield


def kernels_of(made: type[Kernels], rank: Rank) -> Kernels:
    """Other kernels for what a rank holds."""
    own = rank.kernels
    kernels = made(own.tables, rank.memory, own.sent, own.received, Workspace(DEVICE))
    kernels.sent.fill_(0)
    return kernels


def differing(ours: Tensor, theirs: Tensor) -> list[int]:
    """Places of bytes or numbers that differ."""
    return torch.ne(ours.cpu(), theirs.cpu()).nonzero().flatten().tolist()


def check(rank: Rank, notices: int = 0, bad: Sequence[int] = ()) -> None:
    """The kernels write what the CPU writes; ``bad``: tensors that are not finite."""
    accumulated, keys = rank.expected()
    expected = rank.message(accumulated, keys, bad, notices).clone()
    written = rank.run(notices)
    assert differing(rank.memory.view(torch.int32), accumulated.view(torch.int32)) == []
    assert differing(written, expected) == []


class Owner:
    """A worker that owns a shard of two tensors, among others with which the CPU has exchanged the same gradients.

    Args:
        workers: How many there are.
        sizes: Elements of the tensors.
        density: Share that is sent.
    """

    def __init__(self, workers: int, sizes: tuple[int, int], density: float) -> None:
        numel = sum(sizes)
        team = Workers(workers, SpanSpec(numel, int(density * numel), (0, sizes[0], numel), ()), sharded("q4"))
        xs, fresh = gradients(workers, numel), torch.ones(2, dtype=torch.uint8)
        parts = [Part(TopK().select(x, each.segments, 0), fresh) for x, each in zip(xs, team.exchanges, strict=True)]
        self.mean, exchange = team.step(xs, parts)[1].mean, team.exchanges[1]
        self.exchange, self.tables = exchange, shard_tables(exchange, np.zeros(2, np.int64))
        self.grads = [part.clone().to(DEVICE) for part in xs[1].split(sizes)]
        known = exchange.sending, exchange.arriving, exchange.sums, exchange.gathered_sums, exchange.lane.message
        self.mail = Mail(*(part.clone().to(DEVICE) for part in known), sum(exchange.out_sizes))
        self.mail.sending.fill_(255)
        self.mail.delivering.fill_(255)
        memory = torch.zeros(numel, device=DEVICE)
        self.kernels = OwnerKernels(self.tables, memory, self.mail, 1, Workspace(DEVICE), Workspace(DEVICE))

    def check(self, weighing: Weighing | None = None) -> None:
        """A window of the kernels writes the messages and means of the CPU; ``weighing``: by roots of 1."""
        kernels, window = self.kernels, WindowKernels(DEVICE)
        kernels.locate(self.grads, weighing)
        kernels.select(1.0, weighing)
        kernels.pack(0)
        kernels.reduce()
        kernels.decode(1.0, window.status)
        window.commit([kernels])
        assert int(window.status) == 0
        assert differing(self.mail.sending, self.exchange.sending) == []
        assert differing(self.mail.delivering, self.exchange.sums) == []
        assert differing(torch.cat(self.grads), self.mean) == []
