"""Environment variables of CUDA and NCCL that prevent overlap, and those that two communicators at once need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from lightning_safusion.comm.catalogue import Collective
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.fusion.settings import EngineSettings

# Of the backward pass, selection, waiting for exchanges, decoding, and NCCL.
_STREAMS = 5
_CONNECTIONS, _IMPLICIT = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"


def _true(value: str) -> bool:
    return value.strip().lower() in ("1", "y", "yes", "t", "true")


def _few(value: str) -> bool:
    return value.strip().isdigit() and int(value) < _STREAMS


def _detail(value: str) -> bool:
    return value.strip().upper() == "DETAIL"


# By name: which values hinder, and how.
_HINDRANCES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    _CONNECTIONS: (_few, f"the {_STREAMS} streams of an exchange wait for each other"),
    "CUDA_LAUNCH_BLOCKING": (_true, "the host waits for every kernel"),
    "TORCH_NCCL_BLOCKING_WAIT": (_true, "the host waits for every exchange"),
    "NCCL_BLOCKING_WAIT": (_true, "the host waits for every exchange"),
    "TORCH_DISTRIBUTED_DEBUG": (_detail, "workers compare every exchange on the host before it begins"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_true, "the host waits where memory is freed"),
}


def hindrances(variables: Mapping[str, str]) -> str | None:
    """What prevents the overlap of exchange and backward pass, and how to get it back, as one line; None if nothing."""
    found = [
        f"{name}={variables[name]} ({effect})"
        for name, (hinders, effect) in _HINDRANCES.items()
        if name in variables and hinders(variables[name])
    ]
    if not found:
        return None
    return f"exchanges do not overlap with the backward pass, because of {', '.join(found)}: unset what is not needed"


def _needs_of_several_communicators(parts: str, own_pace: bool, variables: Mapping[str, str]) -> str | None:
    """What NCCL needs where the setting ``parts`` has kernels of two communicators on a device at once, as one line.

    With ``own_pace`` each worker launches when its own buffers are full, so that orders differ.
    """
    if own_pace:
        return (
            f"{parts} launches at each worker's own pace, and NCCL may deadlock where communicators have kernels in "
            "different orders: do not use it on GPUs beside other collectives of the model, as SyncBatchNorm has"
        )
    connections = variables.get(_CONNECTIONS, "").strip()
    few = connections.isdigit() and int(connections) < 8
    if not few and _true(variables.get(_IMPLICIT, "")):
        return None
    room = f"{_CONNECTIONS} at 8 or more" + (f" (it is {connections})" if few else "")
    return (
        f"{parts} uses two communicators at once, and NCCL may deadlock where their kernels have different orders: set "
        f"{_IMPLICIT}=1 (NCCL 2.26 or later), and leave {room}"
    )


def missing_on_cuda(settings: EngineSettings, collective: Collective, transport: Transport) -> Iterator[str]:
    """One line each on overlap and on communicators, where something is missing in this process."""
    needed = [hindrances(os.environ)]
    own_pace = settings.fusion.streams
    timed = isinstance(settings.fusion, Horovod)
    if transport.world_size > 1 and transport.stream_ordered and (own_pace or timed or collective.several):
        name = "sharded" if settings.collective == "auto" else settings.collective
        parts = f"fusion={settings.fusion.name!r}" if own_pace or timed else f"collective={name!r}"
        needed.append(_needs_of_several_communicators(parts, own_pace, os.environ))
    return filter(None, needed)
