"""Systems on the clock that decide for each tensor: ADTopk, HiPress, Espresso, SSFusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from lightning_safusion.comm.cost import LinearCost, log2_ceil
from lightning_safusion.fusion.plans.per_tensor import HiPress, Iteration, Option, choose_options, compresses
from lightning_safusion.fusion.plans.selective import SelectiveChoice, choose_offloaded, choose_selective
from lightning_safusion.tools.plan.engine import simulate
from lightning_safusion.tools.plan.job import Job, line
from lightning_safusion.tools.plan.schedule import Message, Schedule

_PARTS = (1, 2, 4, 8)  # of one compressed gradient, that are tried
_SSFUSION_BUFFERS = 20  # into which tensors are cut, and one for the rest
_KERNEL = 5e-6  # seconds: launch of a decoding kernel


def adtopk(job: Job) -> Schedule:
    """One message per tensor, each row selected from by itself; tensors of one dimension are dense."""
    messages, selects = [], np.zeros(len(job.numels))
    for place, tensor in enumerate(job.trace.tensors):
        if len(tensor.shape) < 2:
            messages.append(job.dense_message([place]))
            continue
        length = tensor.shape[1]
        entries = tensor.numel // max(1, length) * max(1, int(length * job.density))
        nbytes = float(entries) * job.entry_bytes
        span = job.span(float(tensor.numel), float(entries))
        messages.append(job.decoded([place], job.cluster.allgather(nbytes), span, job.cluster.workers))
        selects[place] = job.select_cost(tensor.numel)
    return Schedule(messages, selects.tolist())


def hipress(job: Job) -> Schedule:
    """Each gradient compressed or not, as HiPress's cost model says; compressed ones in parts, dense ones batched."""
    primitives = _primitives(job)
    messages: list[Message] = []
    dense: list[int] = []
    bulk = HiPress().bulk_bytes
    for place, numel in enumerate(job.trace.numels):
        ratio = float(job.sparse_bytes[place] / job.dense_bytes[place]) if numel else 1.0
        if compresses(numel, job.cluster.workers, ratio, *primitives):
            messages += _in_parts(job, place)
        else:
            dense.append(place)
        if dense and (job.dense_bytes[dense].sum() >= bulk or place == len(job.numels) - 1):
            messages.append(job.dense_message(dense))
            dense = []
    return Schedule(messages)


def _primitives(job: Job) -> tuple[LinearCost, LinearCost, LinearCost]:
    """The way to a server, encoding and decoding, per fp32 element."""
    cluster = job.cluster
    link, sharing = (cluster.share, cluster.gpus_per_node) if cluster.nodes > 1 else (cluster.intra, 1)
    element = 4.0 * link.beta * sharing
    server = LinearCost(link.launch + log2_ceil(cluster.workers) * link.alpha, (cluster.workers - 1) * element)
    each = line(lambda nbytes: job.decode_seconds(job.span_of_bytes(nbytes), 1))
    decode = LinearCost(max(_KERNEL, each.fixed), 4.0 * each.per_byte)
    encode = LinearCost(job.select_cost.fixed, job.select_cost.per_element)
    return server, encode, decode


def _in_parts(job: Job, place: int) -> list[Message]:
    """A compressed gradient in the number of parts with which selection hides best behind exchange."""

    def split(parts: int) -> Message:
        nbytes = float(job.sparse_bytes[place]) / parts
        select = float(job.select_cost(float(job.numels[place]) / parts))
        span = job.span(float(job.numels[place]) / parts, float(job.entries[place]) / parts)
        return job.decoded([place], job.cluster.allgather(nbytes), span, job.cluster.workers, select)

    def seconds(parts: int) -> float:
        part = split(parts)
        exchange = part.cost.seconds + part.decode
        return part.select + (parts - 1) * max(part.select, exchange) + exchange

    parts = min(_PARTS, key=seconds)
    return [split(parts)] * parts


def espresso(job: Job) -> Schedule:
    """Precision, compression and device of each tensor, by trial on the clock itself; no merging."""

    message = cache(partial(_message, job))  # trials differ in few tensors

    def schedule(options: Sequence[Option]) -> Schedule:
        selects, host = np.zeros(len(options)), np.zeros(len(options))
        for place, option in enumerate(options):
            if option == "sparse":
                selects[place] = job.selects[place]
            elif option == "sparse-cpu":
                host[place] = job.cluster.device.cpu(job.numels[place])
        return Schedule(list(map(message, range(len(options)), options)), selects.tolist(), host.tolist())

    def trial(options: Sequence[Option]) -> Iteration:
        result = simulate(job.trace, job.cluster, schedule(options))
        return Iteration(result.seconds, result.first_busy)

    return schedule(choose_options(job.trace.numels, trial))


def _message(job: Job, place: int, option: Option) -> Message:
    cluster = job.cluster
    if option in ("full", "half"):
        return job.dense_message([place], 4 if option == "full" else 2)
    if cluster.gpus_per_node > 1 and cluster.nodes > 1:
        cost = cluster.hierarchical(float(job.sparse_bytes[place]), float(job.numels[place]) * 2)
        return replace(job.decoded([place], cost, job.span_of([place]), cluster.nodes), collectives=3)
    return job.sparse_message([place], select=False)


def ssfusion(job: Job, offload: bool, interleaved: bool) -> Schedule:
    """SSFusion: in each buffer, tensors up to a size are dense, and the others have a lower density for it.
    ``offload``: the host selects whenever it is free (SSFusion-O); ``interleaved``: dense tensors by all-reduce
    (SSFusion-I), else all in one all-gather."""
    total = len(job.numels)
    size = max(1, total // _SSFUSION_BUFFERS)
    messages: list[Message] = []
    selects, host = np.zeros(total), np.zeros(total)
    for start in range(0, total, size):
        places = range(start, min(start + size, total))
        choice = _selective(job, places, interleaved)
        if offload:
            host[places] = _offloaded(job, places, choice)
        on_device = [place for place, dense in zip(places, choice.dense, strict=True) if not (dense or host[place])]
        if not job.segmented:
            selects[on_device] = job.select_cost(job.numels[on_device])
        messages += _exchanges(job, places, choice, interleaved, on_device if job.segmented else [])
    return Schedule(messages, selects.tolist(), host.tolist())


def _selective(job: Job, places: range, interleaved: bool) -> SelectiveChoice:
    numels = job.trace.numels[places.start : places.stop]

    def seconds(choice: SelectiveChoice) -> float:
        messages = _exchanges(job, places, choice, interleaved, [])
        sparse = [float(numel) for numel, dense in zip(numels, choice.dense, strict=True) if not dense]
        selection = job.select_cost(sum(sparse) if job.segmented else np.array(sparse)).sum()
        return float(selection) + sum(message.cost.seconds + message.decode for message in messages)

    return choose_selective(numels, job.density, seconds)


def _offloaded(job: Job, places: range, choice: SelectiveChoice) -> np.ndarray:
    """Seconds on the host of the tensors that it selects from, 0 for the others [m]."""
    device, numels = job.cluster.device, job.numels[places]
    on_host = device.cpu(numels)
    offloaded = choose_offloaded(
        np.cumsum([job.trace.tensors[place].backward for place in places]).tolist(),
        [not dense for dense in choice.dense],
        job.select_cost(numels).tolist(),
        (on_host + numels * 4 / device.pcie).tolist(),
    )
    return np.where(offloaded, on_host, 0.0)


def _exchanges(
    job: Job, places: range, choice: SelectiveChoice, interleaved: bool, selected: Sequence[int]
) -> list[Message]:
    """The collectives of one buffer; ``selected``: tensors from which the device selects when the buffer is full."""
    dense = [place for place, is_dense in zip(places, choice.dense, strict=True) if is_dense]
    sparse = [place for place in places if place not in dense]
    entries = np.maximum(1, (job.numels[sparse] * choice.density).astype(np.int64)).sum() if sparse else 0
    nbytes = float(entries) * job.entry_bytes
    select = float(job.select_cost(float(job.numels[list(selected)].sum())))
    messages = [job.dense_message(dense)] if dense and interleaved else []
    if not interleaved:
        nbytes += float(job.dense_bytes[dense].sum())
    members = sparse if interleaved else places
    if members:
        span = job.span(float(job.numels[sparse].sum()), float(entries), len(sparse))
        messages.append(job.decoded(members, job.cluster.allgather(nbytes), span, job.cluster.workers, select))
    return messages
