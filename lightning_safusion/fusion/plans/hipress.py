"""HiPress (SOSP 2021): each tensor compressed or not, by a closed cost model."""

from __future__ import annotations

import numpy as np

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.plans.policy import PROFILED_WINDOWS, PlannedOnce


def compresses(
    numel: int, world_size: int, ratio: float, server: LinearCost, encode: LinearCost, decode: LinearCost
) -> bool:
    """Whether HiPress's selective compression and partitioning (SeCoPa) compresses a gradient: its own cost model.

    Raw and compressed are compared in 1 to n parts each, with parameter servers beside the workers. Merging of values
    is free in this model.

    Args:
        numel: Elements of the gradient.
        world_size: Workers (n).
        ratio: Compressed size over raw size.
        server: All workers to a server, or a server to all workers, by elements.
        encode: Compression, by elements.
        decode: Decompression, by compressed elements.
    """
    raw, compressed = [], []
    for parts in range(1, world_size + 1):
        part = numel / parts
        encodes, decodes = min(parts + 1, world_size), min(world_size - 1 + parts, 2 * (world_size - 1))
        raw.append(2 * server(part))
        compressed.append(2 * server(ratio * part) + encodes * encode(part) + decodes * decode(ratio * part))
    return min(compressed) < min(raw)


def choose_compressed(costs: GroupCosts) -> list[bool]:
    """Whether HiPress compresses each tensor [L], for exchanges that are one collective each.

    SeCoPa compares ``alpha * send + beta * encode + gamma * decode`` of the synchronisation strategy at hand, with and
    without compression. Here raw gradients take an all-reduce, compressed ones an all-gather, after one selection; all
    messages are decoded at once. A tensor that may send all of its elements is not compressed.

    Args:
        costs: Agreed numbers.
    """
    decode_fixed, decode = costs.decode
    compressed = costs.sparse[0] + decode_fixed + (costs.sparse[1] + decode) * np.array(costs.sparse_bytes)
    compressed = compressed + costs.selection(np.array(costs.numels))
    raw = costs.dense[0] + costs.dense[1] * np.array(costs.dense_bytes)
    pays = (compressed < raw).tolist()
    return [
        costs.sparse_allowed and not sends_all and (faster or not costs.dense_allowed)
        for faster, sends_all in zip(pays, costs.sends_all, strict=True)
    ]


class HiPress(PlannedOnce):
    """HiPress (SOSP 2021): each gradient is compressed if that makes its exchange faster; small raw ones are batched.

    For selection from each tensor (``scope="tensor"``) and both collectives (``collective="auto"``). Differences from
    the paper, and their reasons:

    - Gradients are exchanged by collectives and not by CaSync's task graph of rings or servers: these are what the cost
      model compares (``choose_compressed``), with measured times in place of a table.
    - A compressed gradient is one message. CaSync splits it to encode one part while the part before is sent; here
      other gradients are selected from meanwhile. (The simulator's ``hipress`` has both, CaSync's costs and parts.)
    - Batches hold neighbours only: buffers are ranges of the ready order.

    Args:
        bulk_bytes: Raw neighbours share a buffer until it holds so many bytes ("bulk synchronisation").
        windows: Windows that are measured before.

    Raises:
        ValueError: If a number is out of range.
    """

    name = "hipress"

    def __init__(self, bulk_bytes: int = 4 * 2**20, windows: int = PROFILED_WINDOWS) -> None:
        super().__init__(windows)
        if bulk_bytes < 0:
            raise ValueError(f"bulk_bytes must not be negative, got {bulk_bytes}")
        self.bulk_bytes = bulk_bytes

    def plan(self, costs: GroupCosts) -> Plan:
        groups: list[Group] = []
        held = float("inf")  # bytes of the open batch; no batch is open
        raw: CollectiveName = "allreduce" if costs.dense_allowed else "allgather"
        for place, compressed in enumerate(choose_compressed(costs)):
            if compressed:
                groups.append(Group(place, place + 1, "allgather"))
                held = float("inf")
            elif held < self.bulk_bytes:
                groups[-1] = Group(groups[-1].start, place + 1, raw)
                held += costs.dense_bytes[place]
            else:
                groups.append(Group(place, place + 1, raw))
                held = costs.dense_bytes[place]
        return Plan(tuple(groups))
