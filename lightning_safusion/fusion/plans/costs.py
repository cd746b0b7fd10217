"""The costs of a job: sizes and quotas of its tensors, priced with agreed times, or with modelled ones before that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from lightning_safusion.comm.cost import LINKS, LinearCost
from lightning_safusion.comm.wire import resolve_codec
from lightning_safusion.fusion.generator import Generator
from lightning_safusion.fusion.plans.plan import GroupCosts
from lightning_safusion.fusion.plans.profile import AgreedProfile, modelled_costs

#: What buffers may take; ``"auto"``: the all-gather or the all-reduce, whichever is predicted to be cheaper.
CollectiveChoice = Literal["auto", "allgather", "allreduce"]

_MIB = 2.0**20
#: Bytes of DDP's buckets, and of its first one.
DDP_BUCKET, DDP_FIRST_BUCKET = 25 * _MIB, 1 * _MIB


def ddp_buckets(nbytes: Sequence[float], cap: float = DDP_BUCKET, first: float = DDP_FIRST_BUCKET) -> list[int]:
    """Stops of DDP's buckets: closed by the tensor that fills them, the first one small.

    Args:
        nbytes: Bytes of each tensor in ready order [L].
        cap: Bytes that close a bucket.
        first: Bytes that close the first one.
    """
    stops, held, limit = [], 0.0, first
    for place, size in enumerate(nbytes):
        held += size
        if held >= limit or place == len(nbytes) - 1:
            stops.append(place + 1)
            held, limit = 0.0, cap
    return stops


def predict_plain_ddp(costs: GroupCosts) -> float:
    """Seconds from the start of backward to the end of DDP's last all-reduce: nothing selected, nothing decoded.

    Args:
        costs: Agreed numbers, measured.
    """
    fixed, per_byte = costs.dense
    free = 0.0
    for start, stop in pairwise([0, *ddp_buckets(costs.dense_bytes)]):
        free = max(free, costs.arrivals[stop - 1]) + fixed + per_byte * sum(costs.dense_bytes[start:stop])
    return free


def job_costs(
    generator: Generator,
    collective: CollectiveChoice,
    world_size: int,
    profile: AgreedProfile | None,
    prior: Mapping[str, LinearCost] | None,
) -> GroupCosts:
    """What a planner is asked with; the same on all ranks.

    Args:
        generator: Knows the tensors in ready order, and their quotas.
        collective: What buffers may take.
        world_size: Workers.
        profile: Agreed times; None as long as there are none.
        prior: Costs of ``"allgather"`` and ``"allreduce"`` until then; None for modelled ones.
    """
    layout, quotas = generator.layout, generator.quotas
    sizes = np.diff(layout.edges)
    widths = np.array([spec.dtype.itemsize for spec in layout.specs])
    sparse = np.where(quotas.dense, sizes * widths, quotas.counts * _entry_bytes(generator)) + 1.0
    dense_everywhere = bool(quotas.dense.all())
    arguments = {
        "numels": tuple(int(n) for n in sizes),
        "sparse_bytes": tuple(sparse.tolist()),
        "dense_bytes": tuple((sizes * np.minimum(widths, 4)).astype(float).tolist()),
        "world_size": world_size,
        "dense_allowed": collective != "allgather",
        "sparse_allowed": collective == "allgather" or (collective == "auto" and not dense_everywhere),
    }
    hybrid = generator.pool.sparse == "hybrid"
    return replace(_priced(arguments, profile, prior), quotas=tuple(quotas.counts.tolist()), hybrid=hybrid)


def _priced(
    arguments: dict[str, Any], profile: AgreedProfile | None, prior: Mapping[str, LinearCost] | None
) -> GroupCosts:
    if profile is not None:
        return profile.group_costs(**arguments)
    modelled = modelled_costs(**arguments, link=LINKS["10gbit"])
    if prior is None:
        return modelled
    lines = {name: (prior[name].fixed, prior[name].per_byte) for name in ("allgather", "allreduce")}
    return replace(modelled, sparse=lines["allgather"], dense=lines["allreduce"])


def _entry_bytes(generator: Generator) -> float:
    """Bytes on the wire per selected element, for a buffer with the model's mean density."""
    quotas = generator.quotas
    sizes = np.diff(generator.layout.edges)
    numel = int(sizes[~quotas.dense].sum())
    capacity = int(quotas.counts[~quotas.dense].sum())
    if not capacity:
        return 0.0
    scale = min(1.0, (1 << 24) / numel)  # a buffer, not the model: index formats differ for spans of billions
    numel, capacity = max(1, int(numel * scale)), max(1, int(capacity * scale))
    return resolve_codec(generator.pool.wire, numel, capacity, torch.float32).nbytes / capacity
