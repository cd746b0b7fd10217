"""Published systems that choose for each tensor by itself how it travels: HiPress, Espresso."""

from __future__ import annotations

from typing import Literal, get_args

from lightning_safusion.fusion.plans.espresso import (
    Option,
    choose_compressed,
    choose_options,
    predict_options,
    sends_all,
)
from lightning_safusion.fusion.plans.plan import CollectiveName, Group, GroupCosts, Plan
from lightning_safusion.fusion.plans.ticking import PROFILED_WINDOWS, PlannedOnce

Fabric = Literal["nvlink", "pcie"]


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


class Espresso(PlannedOnce):
    """Espresso (EuroSys 2023): full precision, half precision or compression for each tensor, by simulated iterations.

    For selection from each tensor (``scope="tensor"``) and both collectives (``collective="auto"``); nothing is merged.
    What differs from the paper, and why:

    - The iteration is simulated with times that were measured in the job, not with tables of encoding costs.
    - Two of the collectives: all-reduce for whole tensors, all-gather for compressed ones. The choice between one and
      two compressions is one of collectives in several steps, which are no choice of a single buffer here.
    - Tensors are not selected from on the CPU: on a job without accelerators that is where they are, and on one with
      them its speed is not among the agreed times. (The simulator's ``espresso`` has both options.)
    - Compression is charged to the stream of the backward pass, not to the link as well, as the release does it; its
      gaps between gradients are taken modulo 1 ms.

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
        if fabric not in get_args(Fabric):
            raise ValueError(f"unknown fabric {fabric!r}: choose one of {list(get_args(Fabric))}")
        self.fabric: Fabric = fabric

    def options(self, costs: GroupCosts) -> list[Option]:
        """The option of each tensor [L]. Pure."""
        sparse = [costs.sparse_allowed and not whole for whole in sends_all(costs)]
        if not costs.dense_allowed:
            return ["sparse"] * len(sparse)
        return choose_options(
            costs.numels, lambda options: predict_options(costs, options), self.fabric, cpu=False, compress=sparse
        )

    def plan(self, costs: GroupCosts) -> Plan:
        groups = []
        for place, option in enumerate(self.options(costs)):
            collective: CollectiveName = "allgather" if option == "sparse" else "allreduce"
            groups.append(Group(place, place + 1, collective, half=option == "half"))
        return Plan(tuple(groups))
