"""The engine below a model that is wrapped already, in a training loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_safusion.announce import MisconfigurationException
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.settings import Integrity
from lightning_safusion.integration.attached import Attached
from lightning_safusion.integration.wrapped import InDDP, Wrapped
from lightning_safusion.lookup import QuotaRule, Scope, SelectBy
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.systems import DEFAULT, SHARDED_ROWS
from lightning_safusion.systems.settings import JobParts, job_parts


class Parts(TypedDict, total=False):
    """What can be put in the place of a system's own parts; see :class:`~lightning_safusion.SAFusionStrategy`."""

    compressor: str | Sparsifier | None
    fusion: str | FusionPolicy | None
    scope: Scope | None
    quota: QuotaRule | None
    dense: list[str] | None
    dense_below: int | None
    dense_below_ndim: int | None
    memory: str | Memory | None
    collective: str | None
    wire: str | None
    offload: bool | None
    select_by: SelectBy | None
    integrity: Integrity | None


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    density: float | DensitySchedule | None = None,
    system: str = DEFAULT,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    replicate_mesh: DeviceMesh | None = None,
    **parts: Unpack[Parts],
) -> Attached:
    """Has the gradients of a wrapped model exchanged sparse, from the next backward pass on. Collective.

    A model in ``DistributedDataParallel``; or one that FSDP2 shards inside of nodes, ``fully_shard(model,
    mesh=mesh["shard"])``, and that is replicated between them, ``replicate_mesh=mesh["replicate"]``.

    The loop stays as it is: forward and backward passes, ``no_sync()``, clipping, a loss scaler, the steps of the
    optimizers. With ``DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)`` gradients
    come one by one, and are not copied; other buckets work as well.

    Args:
        model: Wrapped in DDP, without a communication hook, or the root of a sharded one; it may have been compiled.
        optimizers: All that step its parameters. None: those that step until its second forward pass in training;
            DDP averages the gradients so long.
        density: Share of the elements to send, in (0, 1], or a schedule; None: one that suits the optimizers.
        system: A scheme by name; one that the engine serves, or for a sharded model ``"hsdp"`` or
            ``"hsdp-bf16"``: an all-reduce between the replicas.
        scaler: Scales the loss; its gradients are exchanged as they would be without it.
        timeout: Of further communicators; None: that of the backend.
        replicate_mesh: Of workers that have the same shards; None with DDP.
        parts: ``compressor``, ``fusion``, ``scope``, ``quota``, ``dense``, ``dense_below``, ``dense_below_ndim``,
            ``memory``, ``collective``, ``wire``, ``offload``, ``select_by``, ``integrity``: as of
            :class:`~lightning_safusion.SAFusionStrategy`.

    Returns:
        What is attached, with its figures and its state.

    Raises:
        MisconfigurationException: If an optimizer, or a system, does not go with it.
        RuntimeError: On all workers, if their settings differ, with both values; if the model has a hook already; if it
            is sharded, and torch is older than 2.8.
        TypeError: If the model is not wrapped, an argument is of another type, or there is no such part.
        ValueError: If a name, number or timeout is not one of the possible ones; if FSDP2 averages over replicas
            itself; if the model is a part of a sharded one, here or in its first forward pass.

    Example::

        model = DistributedDataParallel(Net().to(device), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
        handle = lightning_safusion.attach(model, optimizer)
    """
    job = checked_parts(system, density, parts, sharded=replicate_mesh is not None)
    _check_options(scaler, timeout)
    wrapped = _wrapped(getattr(model, "_orig_mod", model), replicate_mesh, job)
    attached = Attached(wrapped, job, scaler, timeout)
    if optimizers is not None:
        try:
            attached.bind(optimizers)
        except BaseException:
            attached.close()
            raise
    return attached


PARTS = tuple(Parts.__annotations__)
#: Hooks of DDP whose work is done for sharded models as well, and the type of what they send; None: as it is.
NARROW: Mapping[str | None, torch.dtype | None] = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def checked_parts(
    system: str, density: float | DensitySchedule | None, parts: Mapping[str, Any], sharded: bool = False
) -> JobParts:
    """What :func:`attach` makes of its arguments; it raises its errors."""
    if unknown := parts.keys() - set(PARTS):
        raise TypeError(f"attach has no argument {min(unknown)!r}; the parts are {', '.join(PARTS)}")
    job = job_parts(SHARDED_ROWS.get(system, system) if sharded else system, density, parts)
    if job.system.ddp_hook is None or (sharded and job.system.ddp_hook in NARROW):
        return job
    raise MisconfigurationException(
        f"system={system!r} works without the engine, in a hook of DDP: "
        + ("a sharded model has none." if sharded else "register the one of torch's ddp_comm_hooks on the model.")
    )


def _check_options(scaler: Any, timeout: Any) -> None:
    if scaler is not None and not hasattr(scaler, "_get_scale_async"):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r:.80} of type {type(scaler).__name__}")
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, such as timedelta(minutes=5), got {timeout!r:.80}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be longer than nothing, got {timeout!r}; timedelta(minutes=5) are five minutes")


def _wrapped(model: nn.Module, mesh: DeviceMesh | None, job: JobParts) -> Wrapped:
    fsdp2: Any = getattr(fsdp, "FSDPModule", None)  # torch 2.6
    if fsdp2 is not None and isinstance(model, fsdp2):
        from lightning_safusion.integration.sharded import InFSDP, begin_alike

        if mesh is None:
            raise TypeError("a model that fully_shard has sharded needs replicate_mesh, the dimension of its replicas")
        wrapped = InFSDP(model, mesh, narrow=NARROW.get(job.system.ddp_hook))
        begin_alike([*model.parameters(), *model.buffers()], wrapped.group)
        return wrapped
    if isinstance(model, fsdp.FullyShardedDataParallel):
        raise TypeError("attach does not serve FullyShardedDataParallel (FSDP1): shard the model with fully_shard")
    if not isinstance(model, DistributedDataParallel) and mesh is not None:
        raise TypeError(
            f"replicate_mesh is for models that fully_shard has sharded, and {type(model).__name__} is none: call "
            "fully_shard(model, mesh=mesh['shard']) after its layers"
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"attach needs a model in DistributedDataParallel, got {type(model).__name__}")
    if mesh is not None:
        raise TypeError("replicate_mesh is for models that fully_shard has sharded; DDP has a process group")
    return InDDP(model)
