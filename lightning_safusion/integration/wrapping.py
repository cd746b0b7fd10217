"""Wraps the model in DistributedDataParallel, with the checks that come before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_safusion.comm.transport.horovod import HorovodTransport
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.transport.torch_backend import TorchTransport, default_transport
from lightning_safusion.integration.horovod import check_horovod
from lightning_safusion.integration.parameters import check_same_trainable, trainable

Named = Sequence[tuple[str, nn.Parameter]]


def make_transport(
    model: nn.Module, over_horovod: bool, world_size: int, group: Any, timeout: timedelta | None
) -> Transport:
    """The communicator of the gradients. Collective.

    Args:
        model: Will be trained.
        over_horovod: Horovod carries the gradients.
        world_size: Workers of Lightning.
        group: The process group that the user has given DDP; None for the default one.
        timeout: Of collectives.
    """
    if over_horovod:
        transport = HorovodTransport()
        check_horovod(model, transport.world_size, world_size)
        return transport
    return default_transport(timeout) if group is None else TorchTransport(group, timeout)


def refuse_python_reducer() -> None:
    """Refuses a setting of Dynamo that leaves out DDP's buckets.

    Raises:
        MisconfigurationException: If it is set.
    """
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise MisconfigurationException(
            "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's buckets, which this strategy "
            "works on; set it to True (the default) or False."
        )


def replaced_parameters(module: nn.Module, wrapped: Named, transport: Transport, epoch: int) -> list[str] | None:
    """Whether parameters were frozen, unfrozen or replaced since the model was wrapped. Collective.

    Args:
        module: The model.
        wrapped: Trainable parameters that DDP knows.
        transport: Communicator.
        epoch: That begins.

    Returns:
        Names of parameters that are other objects now; None if nothing has changed on any rank.

    Raises:
        RuntimeError: If the ranks have different trainable parameters.
    """
    names = [name for name, _ in trainable(module)]
    known = dict(wrapped)
    replaced = [name for name, param in trainable(module) if known.get(name, param) is not param]
    same = not replaced and names == list(known)
    with during(f"the beginning of epoch {epoch}, when workers compare their trainable parameters"):
        everyone = transport.gather_objects((names, same))
    check_same_trainable([theirs for theirs, _ in everyone])
    return None if all(unchanged for _, unchanged in everyone) else replaced
