"""HiPress (SOSP 2021): each tensor compressed or not, by a closed cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.plans.policy import PROFILED_WINDOWS, PlannedOnce


@dataclass(frozen=True)
class PrimitiveCost:
    """Time of one of HiPress's primitives: ``max(floor, fixed + per_element * x)`` seconds for ``x`` elements.

    Args:
        fixed: Seconds of any call.
        per_element: Seconds per element.
        floor: Least seconds of a call.
    """

    fixed: float
    per_element: float
    floor: float = 0.0

    def __call__(self, elements: float) -> float:
        """Seconds for ``elements`` elements."""
        return max(self.floor, self.fixed + self.per_element * elements)


@dataclass(frozen=True)
class Primitives:
    """Costs of the primitives out of which CaSync (HiPress, SOSP 2021) composes an exchange.

    Args:
        send: One hop of a ring.
        gather: All workers to a server.
        broadcast: A server to all workers.
        encode: Compression.
        decode: Decompression, of compressed elements.
    """

    send: PrimitiveCost
    gather: PrimitiveCost
    broadcast: PrimitiveCost
    encode: PrimitiveCost
    decode: PrimitiveCost


class PartsChoice(NamedTuple):
    """What HiPress decides for one gradient.

    Args:
        compress: Whether it is compressed.
        parts: Parts it is split into.
        seconds: Predicted time of its exchange.
    """

    compress: bool
    parts: int
    seconds: float


def choose_parts(
    numel: int,
    world_size: int,
    ratio: float,
    costs: Primitives,
    topology: Literal["ring", "server"] = "ring",
) -> PartsChoice:
    """HiPress's selective compression and partitioning (SeCoPa): the cheapest of raw and compressed in 1 to n parts.

    Merging of values is free in this model. A compressed ring encodes again at every hop.

    Args:
        numel: Elements of the gradient.
        world_size: Workers (n).
        ratio: Compressed size over raw size.
        costs: The primitives.
        topology: ``"ring"``, or ``"server"`` (parameter servers beside the workers).

    Raises:
        ValueError: If the topology is unknown, there is no worker, or the ratio is not above 0.
    """
    if topology not in ("ring", "server"):
        raise ValueError(f"unknown topology {topology!r}: choose 'ring' or 'server'")
    if world_size < 1 or not ratio > 0:
        raise ValueError(f"need at least one worker and a positive ratio, got {world_size} and {ratio}")
    seconds = _ring_seconds if topology == "ring" else _server_seconds
    choices = [
        PartsChoice(compress, parts, seconds(numel / parts, world_size, parts, ratio if compress else None, costs))
        for compress in (False, True)
        for parts in range(1, world_size + 1)
    ]
    return min(choices, key=lambda choice: choice.seconds)


def _ring_seconds(part: float, n: int, parts: int, ratio: float | None, costs: Primitives) -> float:
    if ratio is None:
        return 2 * (n - 1) * costs.send(part)
    return 2 * (n - 1) * costs.send(ratio * part) + n * costs.encode(part) + n * costs.decode(ratio * part)


def _server_seconds(part: float, n: int, parts: int, ratio: float | None, costs: Primitives) -> float:
    if ratio is None:
        return costs.gather(part) + costs.broadcast(part)
    encodes, decodes = min(parts + 1, n), min(n - 1 + parts, 2 * (n - 1))
    wire = costs.gather(ratio * part) + costs.broadcast(ratio * part)
    return wire + encodes * costs.encode(part) + decodes * costs.decode(ratio * part)


def choose_compressed(costs: GroupCosts) -> list[bool]:
    """HiPress's question, compress or not, for exchanges that are one collective each.

    SeCoPa compares ``alpha * send + beta * encode + gamma * decode`` of the synchronisation strategy at hand, with and
    without compression. Here raw gradients take an all-reduce, compressed ones an all-gather, after one selection; all
    messages are decoded at once.

    Args:
        costs: Agreed numbers.

    Returns:
        Whether each tensor is compressed [L]. One whose quota is the whole tensor is not.
    """
    decode_fixed, decode = costs.decode
    whole = costs.sends_all
    compressed = costs.sparse[0] + decode_fixed + (costs.sparse[1] + decode) * np.array(costs.sparse_bytes)
    compressed = compressed + costs.selection(np.array(costs.numels))
    raw = costs.dense[0] + costs.dense[1] * np.array(costs.dense_bytes)
    pays = (compressed < raw).tolist()
    return [
        costs.sparse_allowed and not all_of_it and (faster or not costs.dense_allowed)
        for faster, all_of_it in zip(pays, whole, strict=True)
    ]


class HiPress(PlannedOnce):
    """HiPress (SOSP 2021): each gradient is compressed if its exchange is faster for that, small raw ones are batched.

    For selection from each tensor (``scope="tensor"``) and both collectives (``collective="auto"``). What differs from
    the paper, and why:

    - Gradients are exchanged by collectives and not by CaSync's task graph of rings or servers, so the cost model is
      asked about these (``choose_compressed``), with measured times in place of a table.
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
        held = float("inf")  # bytes of the batch that is open; none is
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
