"""Published choices per tensor: compress or not, in how many parts, and where. Pure functions of explicit numbers.

HiPress splits and compresses each gradient by a closed cost model; Espresso tries choices out on a simulator, which is
handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from lightning_safusion.fusion.plans.behind import SelectionCost
from lightning_safusion.fusion.plans.plan import GroupCosts

#: Exact selection on a device, as long as nothing was measured.
NOMINAL_SELECTION = SelectionCost(40e-6, 1e-10)
#: Elements above which Espresso's release compresses a gradient: with NVLink inside the node, and with PCIe.
ESPRESSO_COMPRESS_ABOVE = {"nvlink": 2**19, "pcie": 2**20}
#: Elements above which it lets gradients travel in half precision.
ESPRESSO_HALF_ABOVE = 2**17
#: Elements from which a tensor is never selected on the CPU there.
ESPRESSO_CPU_BELOW = 32 * 2**20


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


Option = Literal["full", "half", "sparse", "sparse-cpu"]


class Trial(NamedTuple):
    """What a simulated iteration says of a choice of options.

    Args:
        seconds: Time of the iteration.
        last_idle: Place of the first tensor after the last moment at which the link waited for a gradient.
    """

    seconds: float
    last_idle: int


def choose_options(
    numels: Sequence[int],
    simulate: Callable[[Sequence[Option]], Trial],
    fabric: Literal["nvlink", "pcie"] = "nvlink",
    cpu: bool = True,
    compress: Sequence[bool] | None = None,
) -> list[Option]:
    """Espresso's decisions (EuroSys 2023): precision, compression and device of each gradient.

    1. Tensors before the last moment at which the link idles cannot shorten the iteration: they keep full precision,
       or half precision once that has been settled.
    2. Sizes propose what the others may become.
    3. In falling size, later ones first: a tensor is compressed if that shortens the iteration.
    4. Compressed tensors of equal size, in turn: as many go to the CPU as is best. The release tries all combinations
       of the counts of all sizes; here the sizes are tried one after the other, from the largest, so that the number
       of simulations is their sum and not their product.

    Args:
        numels: Elements of the gradients in ready order [L].
        simulate: The iteration with one option per tensor.
        fabric: Connection inside a node; decides from which size compression is tried.
        cpu: Whether tensors may be selected on the CPU.
        compress: Whether each tensor may be compressed at all [L]; by default all may.

    Returns:
        The option of each tensor [L].
    """
    options: list[Option] = ["full"] * len(numels)
    first = simulate(options).last_idle
    options = ["half" if i >= first and n > ESPRESSO_HALF_ABOVE else "full" for i, n in enumerate(numels)]
    best = simulate(options)
    above = ESPRESSO_COMPRESS_ABOVE[fabric]
    candidates = [
        i
        for i in range(max(first, best.last_idle), len(numels))
        if numels[i] > above and (compress is None or compress[i])
    ]
    for place in sorted(candidates, key=lambda i: (-numels[i], -i)):
        tried = [*options[:place], "sparse", *options[place + 1 :]]
        trial = simulate(tried)
        if trial.seconds < best.seconds:
            options, best = tried, trial
    return _offload(numels, options, best.seconds, simulate) if cpu else options


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
    whole = sends_all(costs)
    compressed = costs.sparse[0] + decode_fixed + (costs.sparse[1] + decode) * np.array(costs.sparse_bytes)
    compressed = compressed + _encode(costs)(np.array(costs.numels))
    raw = costs.dense[0] + costs.dense[1] * np.array(costs.dense_bytes)
    pays = (compressed < raw).tolist()
    return [
        costs.sparse_allowed and not all_of_it and (faster or not costs.dense_allowed)
        for faster, all_of_it in zip(pays, whole, strict=True)
    ]


def sends_all(costs: GroupCosts) -> list[bool]:
    """Whether the quota of each tensor is the whole tensor [L]; not where nobody knows the quotas."""
    quotas = costs.quotas or (0,) * len(costs.numels)
    return [quota >= numel for quota, numel in zip(quotas, costs.numels, strict=True)]


def predict_options(costs: GroupCosts, options: Sequence[Option]) -> Trial:
    """Espresso's simulated iteration: every tensor alone, with one option each; from the start of backward.

    Compression runs on the stream of the backward pass and delays all later gradients; exchanges take the link first
    come, first served.

    Args:
        costs: Agreed numbers.
        options: ``"full"``, ``"half"`` or ``"sparse"`` for each tensor [L].

    Raises:
        ValueError: If a tensor is to be selected from on the CPU, whose speed the costs do not know.
    """
    if "sparse-cpu" in options:
        raise ValueError("agreed costs say nothing of selection on the CPU: use 'full', 'half' or 'sparse'")
    encode = _encode(costs)
    spent = free = 0.0
    first_busy = 0
    for place, option in enumerate(options):
        if option == "sparse":
            spent += float(encode(costs.numels[place]))
            nbytes = costs.sparse_bytes[place]
            seconds = costs.sparse[0] + costs.decode[0] + (costs.sparse[1] + costs.decode[1]) * nbytes
        else:
            share = 0.5 if option == "half" else 1.0
            seconds = costs.dense[0] + costs.dense[1] * share * costs.dense_bytes[place]
        ready = costs.arrivals[place] + spent
        if ready > free:
            first_busy = place
        free = max(free, ready) + seconds
    return Trial(max(free, spent + costs.arrivals[-1]) if options else 0.0, first_busy)


def _encode(costs: GroupCosts) -> SelectionCost:
    """Time of a selection; a nominal one as long as nothing was measured, which must not look free."""
    return SelectionCost(*costs.select) if any(costs.select) else NOMINAL_SELECTION


def _offload(
    numels: Sequence[int], options: list[Option], seconds: float, simulate: Callable[[Sequence[Option]], Trial]
) -> list[Option]:
    """Moves compressed tensors to the CPU, size by size, the earliest ready ones first."""
    sizes = {n for n, option in zip(numels, options, strict=True) if option == "sparse" and n < ESPRESSO_CPU_BELOW}
    for size in sorted(sizes, reverse=True):
        tried = list(options)
        for place, numel in enumerate(numels):
            if numel != size or options[place] != "sparse":
                continue
            tried[place] = "sparse-cpu"
            trial = simulate(tried)
            if trial.seconds < seconds:
                seconds, options = trial.seconds, list(tried)
    return options
