"""Policies that decide for each tensor: HiPress (SOSP 2021) by a cost model, Espresso (EuroSys 2023) by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, Plan
from lightning_safusion.fusion.plans.policy import PROFILED_WINDOWS, PlannedOnce
from lightning_safusion.lookup import check_name

Fabric = Literal["nvlink", "pcie"]

# Of Espresso's release. Elements above which it compresses a gradient: with NVLink inside the node, and with PCIe.
_COMPRESS_ABOVE = {"nvlink": 2**19, "pcie": 2**20}
# Elements above which it sends a gradient in half precision.
_HALF_ABOVE = 2**17
# Elements below which it may select from a tensor on the CPU.
_CPU_BELOW = 32 * 2**20

T = TypeVar("T", float, np.ndarray)

Option = Literal["full", "half", "sparse", "sparse-cpu"]


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


def _gather(costs: GroupCosts, nbytes: T) -> T:
    """Seconds of sparse exchanges and of decoding them, by the bytes of one rank's message."""
    return costs.sparse[0] + costs.decode[0] + (costs.sparse[1] + costs.decode[1]) * nbytes


def choose_compressed(costs: GroupCosts) -> list[bool]:
    """Whether HiPress compresses each tensor [L]: an all-reduce against a selection, an all-gather and a decoding.

    A tensor that may send all of its elements is not compressed.
    """
    compressed = _gather(costs, np.array(costs.sparse_bytes)) + costs.selection(np.array(costs.numels))
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


class Iteration(NamedTuple):
    """A simulated iteration with a choice of options."""

    seconds: float
    last_idle: int  #: place of the first tensor after the last moment at which the link waited for a gradient


def choose_options(
    numels: Sequence[int],
    simulate: Callable[[Sequence[Option]], Iteration],
    fabric: Fabric = "nvlink",
    cpu: bool = True,
    compress: Sequence[bool] | None = None,
) -> list[Option]:
    """Espresso's decisions (EuroSys 2023): precision, compression and device of each gradient [L].

    1. Tensors before the last moment at which the link idles cannot shorten the iteration: they keep full precision,
       or half precision after step 2.
    2. Of the others, those of more than 2**17 elements get half precision.
    3. Larger ones are candidates for compression. In falling size, later ones first: a tensor is compressed if that
       shortens the iteration.
    4. Compressed tensors of equal size, in turn: as many go to the CPU as is best. The release tries all combinations
       of the counts of all sizes; here the sizes are tried one after the other, from the largest, so that the number
       of simulations is their sum and not their product.

    Args:
        numels: Elements of the gradients in ready order [L].
        simulate: The iteration with one option per tensor.
        fabric: Connection inside a node; decides from which size compression is tried.
        cpu: Whether tensors may be selected on the CPU.
        compress: Whether each tensor may be compressed at all [L]; by default all may.
    """
    options: list[Option] = ["full"] * len(numels)
    first = simulate(options).last_idle
    options = ["half" if i >= first and n > _HALF_ABOVE else "full" for i, n in enumerate(numels)]
    best = simulate(options)
    candidates = [
        i
        for i in range(max(first, best.last_idle), len(numels))
        if numels[i] > _COMPRESS_ABOVE[fabric] and (compress is None or compress[i])
    ]
    for place in sorted(candidates, key=lambda i: (-numels[i], -i)):
        tried = [*options[:place], "sparse", *options[place + 1 :]]
        result = simulate(tried)
        if result.seconds < best.seconds:
            options, best = tried, result
    return _offload(numels, options, best.seconds, simulate) if cpu else options


def _offload(
    numels: Sequence[int], options: list[Option], seconds: float, simulate: Callable[[Sequence[Option]], Iteration]
) -> list[Option]:
    sizes = {n for n, option in zip(numels, options, strict=True) if option == "sparse" and n < _CPU_BELOW}
    for size in sorted(sizes, reverse=True):
        tried = list(options)
        for place, numel in enumerate(numels):
            if numel != size or options[place] != "sparse":
                continue
            tried[place] = "sparse-cpu"
            result = simulate(tried)
            if result.seconds < seconds:
                seconds, options = result.seconds, list(tried)
    return options


def predict_options(costs: GroupCosts, options: Sequence[Option]) -> Iteration:
    """Espresso's simulated iteration: every tensor alone, with one option each; from the start of backward.

    Compression runs on the stream of the backward pass and delays all later gradients; exchanges take the link first
    come, first served. The costs have no selection on the CPU.
    """
    encode = costs.selection
    spent = free = 0.0
    first_busy = 0
    for place, option in enumerate(options):
        if option == "sparse":
            spent += float(encode(costs.numels[place]))
            seconds = _gather(costs, costs.sparse_bytes[place])
        else:
            share = 0.5 if option == "half" else 1.0
            seconds = costs.dense[0] + costs.dense[1] * share * costs.dense_bytes[place]
        ready = costs.arrivals[place] + spent
        if ready > free:
            first_busy = place
        free = max(free, ready) + seconds
    return Iteration(max(free, spent + costs.arrivals[-1]) if options else 0.0, first_busy)


class Espresso(PlannedOnce):
    """Espresso (EuroSys 2023): full precision, half precision or compression for each tensor, by simulated iterations.

    For selection from each tensor (``scope="tensor"``) and both collectives (``collective="auto"``); nothing is merged.
    Differences from the paper, and their reasons:

    - The iteration is simulated with times that were measured in the job, not with tables of encoding costs.
    - Two of the collectives: all-reduce for dense tensors, all-gather for compressed ones. One compression or two is a
      choice of collectives in several steps, which a single buffer does not have here.
    - Tensors are not selected from on the CPU: without accelerators they are there anyway, and with them its speed is
      not among the agreed times. (The simulator's ``espresso`` has both options.)
    - Compression occupies the stream of the backward pass only. In the release it occupies the link as well, and gaps
      between gradients are taken modulo 1 ms.

    Args:
        fabric: Connection inside a node; decides from which size compression is tried: 2**19 elements with
            ``"nvlink"``, 2**20 with ``"pcie"``. From 2**17 elements half precision is.
        windows: Windows that are measured before.

    Raises:
        ValueError: If the fabric is unknown or a number is out of range.
    """

    name = "espresso"

    def __init__(self, fabric: Fabric = "nvlink", windows: int = PROFILED_WINDOWS) -> None:
        super().__init__(windows)
        check_name("fabric", fabric, get_args(Fabric))
        self.fabric: Fabric = fabric

    def options(self, costs: GroupCosts) -> list[Option]:
        """The option of each tensor [L]; pure."""
        if not costs.dense_allowed:
            return ["sparse"] * len(costs.numels)
        sparse = [costs.sparse_allowed and not sends_all for sends_all in costs.sends_all]
        return choose_options(
            costs.numels, lambda options: predict_options(costs, options), self.fabric, cpu=False, compress=sparse
        )

    def plan(self, costs: GroupCosts) -> Plan:
        kinds: dict[Option, CollectiveName] = {"full": "allreduce", "half": "allreduce", "sparse": "allgather"}
        options = enumerate(self.options(costs))
        return Plan(tuple(Group(i, i + 1, kinds[option], half=option == "half") for i, option in options))
