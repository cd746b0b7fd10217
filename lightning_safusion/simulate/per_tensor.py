"""Systems on the clock that choose for each tensor: HiPress, Espresso, SSFusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.espresso import Option, Trial, choose_options
from lightning_safusion.fusion.plans.hipress import HiPress, Primitives, choose_parts
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.plans.selective import SelectiveChoice, choose_offloaded, choose_selective
from lightning_safusion.simulate.engine import simulate
from lightning_safusion.simulate.job import Job
from lightning_safusion.simulate.schedule import Message, Planned, Schedule

# Parts of one compressed gradient that are tried.
_PARTS = (1, 2, 4, 8)
# SSFusion cuts the tensors into this many buffers, and one for the rest.
_SSFUSION_BUFFERS = 20
# Launch of a decoding kernel.
_KERNEL = 5e-6


def hipress(job: Job) -> Schedule:
    """Each gradient compressed or not, as HiPress's cost model says; compressed ones in parts, dense ones batched."""
    primitives = _primitives(job)
    messages: list[Message] = []
    dense: list[int] = []
    bulk = HiPress().bulk_bytes
    for place, numel in enumerate(job.trace.numels):
        ratio = float(job.sparse_bytes[place]) / (4.0 * numel) if numel else 1.0
        choice = choose_parts(numel, job.cluster.workers, ratio, primitives)
        if choice.compress:
            messages += _in_parts(job, place)
        else:
            dense.append(place)
        if dense and (job.numels[dense].sum() * 4 >= bulk or place == len(job.numels) - 1):
            messages.append(job.dense(dense))
            dense = []
    return Schedule(Planned(tuple(messages)), (0.0,) * len(job.numels))


def _primitives(job: Job) -> Primitives:
    """HiPress's primitives with the cluster's numbers, per fp32 element."""
    cluster, device = job.cluster, job.cluster.device
    link, sharing = (cluster.inter, cluster.gpus_per_node) if cluster.nodes > 1 else (cluster.intra, 1)
    element = 4.0 * link.beta * sharing
    rounds, others = (cluster.workers - 1).bit_length(), cluster.workers - 1
    server = LinearCost(link.launch + rounds * link.alpha, others * element)
    decode = LinearCost(_KERNEL, 4.0 / job.entry_bytes * device.decode)
    encode = LinearCost(job.select_cost.fixed, job.select_cost.per_element)
    return Primitives(server, server, encode, decode)


def _in_parts(job: Job, place: int) -> list[Message]:
    """A compressed gradient in so many parts that selection of one hides best behind the exchange of the one before."""
    nbytes, numel = float(job.sparse_bytes[place]), float(job.numels[place])

    def split(parts: int) -> tuple[float, float]:
        exchange = job.cluster.allgather(nbytes / parts).seconds + job.decode_per_byte * nbytes / parts
        return float(job.select_cost(numel / parts)), exchange

    def seconds(parts: int) -> float:
        select, exchange = split(parts)
        return select + (parts - 1) * max(select, exchange) + exchange

    parts = min(_PARTS, key=seconds)
    part = Message(
        (place,),
        job.cluster.allgather(nbytes / parts),
        select=split(parts)[0],
        decode=job.decode_per_byte * nbytes / parts,
    )
    return [part] * parts


def espresso(job: Job) -> Schedule:
    """Precision, compression and device of each tensor, by trial on the clock itself; no merging."""

    def trial(options: Sequence[Option]) -> Trial:
        result = simulate(job.trace, job.cluster, _with_options(job, options))
        return Trial(result.seconds, result.first_busy)

    return _with_options(job, choose_options(job.trace.numels, trial))


def _with_options(job: Job, options: Sequence[Option]) -> Schedule:
    cluster = job.cluster
    messages, selects, host = [], [], []
    for place, option in enumerate(options):
        numel, nbytes = float(job.numels[place]), float(job.sparse_bytes[place])
        selects.append(float(job.selects[place]) if option == "sparse" else 0.0)
        host.append(float(cluster.device.cpu(numel)) if option == "sparse-cpu" else 0.0)
        if option in ("full", "half"):
            messages.append(job.dense([place], 4 if option == "full" else 2))
        elif cluster.gpus_per_node > 1 and cluster.nodes > 1:
            decode = cluster.nodes * nbytes / job.entry_bytes * cluster.device.decode
            cost = cluster.hierarchical(nbytes, numel * 2)
            messages.append(Message((place,), cost, decode=decode, collectives=3))
        else:
            messages.append(job.sparse([place], select=False))
    return Schedule(Planned(tuple(messages)), tuple(selects), tuple(host))


def ssfusion(offload: bool, interleaved: bool) -> Callable[[Job], Schedule]:
    """SSFusion: per buffer, tensors up to a size are dense, and pay for it with a lower density of the others.

    Args:
        offload: Select on the host whenever it is free (SSFusion-O).
        interleaved: Dense tensors by all-reduce, the others by all-gather (SSFusion-I); else all of them in one
            all-gather.
    """

    def build(job: Job) -> Schedule:
        total = len(job.numels)
        size = max(1, total // _SSFUSION_BUFFERS)
        messages: list[Message] = []
        selects, host = np.zeros(total), np.zeros(total)
        for start in range(0, total, size):
            group = Group(start, min(start + size, total))
            choice = _selective(job, group, interleaved)
            sparse = [place for place, dense in enumerate(choice.dense, group.start) if not dense]
            if offload:
                _offload(job, group, choice, host)
            on_device = [place for place in sparse if host[place] == 0]
            if not job.segmented:
                selects[on_device] = job.select_cost(job.numels[on_device])
            messages += _exchanges(job, group, choice, interleaved, on_device if job.segmented else [])
        return Schedule(Planned(tuple(messages)), tuple(selects.tolist()), tuple(host.tolist()))

    return build


def _selective(job: Job, group: Group, interleaved: bool) -> SelectiveChoice:
    numels = job.trace.numels[group.start : group.stop]

    def seconds(dense: Sequence[bool], density: float) -> float:
        messages = _exchanges(job, group, SelectiveChoice(tuple(dense), density), interleaved, [])
        sparse = [float(numel) for numel, whole in zip(numels, dense, strict=True) if not whole]
        selection = job.select_cost(sum(sparse) if job.segmented else np.array(sparse)).sum()
        return float(selection) + sum(message.cost.seconds + message.decode for message in messages)

    return choose_selective(numels, job.density, seconds)


def _offload(job: Job, group: Group, choice: SelectiveChoice, host: np.ndarray) -> None:
    """Fills in the seconds on the host of the tensors that it takes."""
    tensors = job.trace.tensors[group.start : group.stop]
    device = job.cluster.device
    numels = np.array([tensor.numel for tensor in tensors])
    on_host = device.cpu(numels)
    offloaded = choose_offloaded(
        np.cumsum([tensor.backward for tensor in tensors]).tolist(),
        [not dense for dense in choice.dense],
        job.select_cost(numels).tolist(),
        (on_host + numels * 4 / device.pcie).tolist(),
    )
    host[group.start : group.stop] = np.where(offloaded, on_host, 0.0)


def _exchanges(
    job: Job, group: Group, choice: SelectiveChoice, interleaved: bool, selected: Sequence[int]
) -> list[Message]:
    """The collectives of one buffer; ``selected``: tensors from which the device selects when the buffer is full."""
    whole = [place for place, dense in enumerate(choice.dense, group.start) if dense]
    sparse = [place for place, dense in enumerate(choice.dense, group.start) if not dense]
    entries = np.maximum(1, (job.numels[sparse] * choice.density).astype(np.int64)).sum() if sparse else 0
    nbytes = float(entries) * job.entry_bytes
    select = float(job.select_cost(float(job.numels[list(selected)].sum())))
    messages = [job.dense(whole)] if whole and interleaved else []
    if whole and not interleaved:
        nbytes += float(job.numels[whole].sum()) * 4.0
    places = tuple(sparse) if interleaved else tuple(range(group.start, group.stop))
    if places:
        decode = job.decode_per_byte * nbytes
        messages.append(Message(places, job.cluster.allgather(nbytes), select=select, decode=decode))
    return messages
