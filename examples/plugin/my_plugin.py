"""A package that adds one part of every kind to lightning-safusion: ``SAFusionStrategy(system="mine")``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_safusion import FusionPolicy, Memory, Segments, Selection, Sparsifier, as_selection
from lightning_safusion.plugins import (
    Ability,
    Collective,
    Communicators,
    EngineSystem,
    Exchange,
    GroupCosts,
    GroupPricer,
    Part,
    Plan,
    SparseBuffer,
    Verdict,
    Work,
)


class Stride(Sparsifier):
    """Sends every n-th element of a tensor, others in every step, whatever their values are."""

    name = "stride"
    estimates = False  # always exactly the quota

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        places = [np.zeros(0, np.int64)]
        for start, size, quota in zip(segments.edges, segments.sizes, segments.quotas, strict=False):
            places.append(start + np.sort((step + np.arange(quota) * size // max(quota, 1)) % max(size, 1)))
        return as_selection(np.concatenate(places), x)


class Halved(Memory):
    """What was not sent counts half in the next step."""

    name = "halved"
    vectors = ("residual",)
    pending = "residual"
    conserves = False

    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        for view, grad in zip(self.views(ids), grads, strict=True):
            view.mul_(0.5).add_(grad)

    def withdraw(self, tensor: int, grad: Tensor) -> None:
        self.views([tensor])[0].sub_(grad).mul_(2)


class Halves(FusionPolicy):
    """Two buffers of equally many tensors."""

    name = "halves"

    def plan(self, costs: GroupCosts) -> Plan:
        tensors = len(costs.numels)
        return GroupPricer(costs).plan(sorted({-(-tensors // 2), tensors} - {0}))


class PlainGather(Exchange):
    """Gathers one message of every rank: flags and notices, the dense tensors in fp32, and the selection."""

    ability = Ability(few_bits=True)  # messages arrive as they were sent, so that rounding errors are known

    def __init__(self, buffer: SparseBuffer, over: Communicators) -> None:
        super().__init__(buffer.spec, over.main, buffer.device)
        self.codec = buffer.codec  # None where the whole buffer is dense
        self.runs = [slice(start, stop) for start, stop, _ in self.spec.dense_runs]
        dense = sum(run.stop - run.start for run in self.runs)
        header = -(-(self.spec.num_tensors + 1) // 4) * 4
        self.sizes = [header, 4 * dense, self.codec.nbytes if self.codec else 0]
        self.bytes_sent = sum(self.sizes)
        self.bytes_received = self.bytes_sent * (self.transport.world_size - 1)
        self.out = torch.zeros(self.bytes_sent, dtype=torch.uint8, device=self.device)
        self.received = torch.zeros(self.bytes_sent * self.transport.world_size, dtype=torch.uint8, device=self.device)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.none = Selection(nothing, nothing.float(), 0)

    def encode(self, x: Tensor, part: Part) -> None:
        header, dense, coded = self.out.split(self.sizes)
        tensors = self.spec.num_tensors
        header[:tensors], header[tensors] = part.flags, part.notices
        whole = x.clone() if part.absent else x
        for tensor in part.absent:
            whole[self.spec.edges[tensor] : self.spec.edges[tensor + 1]] = 0
        if self.runs:
            dense.view(torch.float32).copy_(torch.cat([whole[run] for run in self.runs]))
        if self.codec:
            selection = part.selection or self.none
            self.echo = selection.indices, self.codec.encode(selection, coded)

    def start(self) -> Work:
        return self.transport.all_gather(self.received, self.out)

    def messages(self) -> list[tuple[Tensor, ...]]:
        return [message.split(self.sizes) for message in self.received.view(self.transport.world_size, -1)]

    def verdict(self) -> Verdict:
        headers = torch.stack([header[: self.spec.num_tensors + 1] for header, _, _ in self.messages()])
        return Verdict.of(headers.cpu().numpy())

    def decode(self, scratch: Tensor) -> Tensor:
        share = 1.0 / self.transport.world_size
        for _, dense, coded in self.messages():  # in the order of ranks: the same bits on all of them
            values = dense.view(torch.float32)
            for run in self.runs:
                mine, values = values.split([run.stop - run.start, len(values) - (run.stop - run.start)])
                scratch[run] += mine * share
            if self.codec:
                indices, sent = self.codec.decode(coded)
                scratch.index_add_(0, indices, sent * share)
        return scratch

    def sent(self) -> tuple[Tensor, Tensor]:
        return self.echo if self.codec else (self.none.indices, self.none.values)

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return x[start:stop]


PLAIN = Collective(PlainGather, PlainGather)

MINE = EngineSystem(
    "mine",
    "before fusion; every n-th element, two buffers",
    "this example",
    fusion="halves",
    compressor="stride",
    memory="halved",
    collective="plain",
)
