"""Plain DDP with other communication hooks: torch's own, the baselines that a user has today, and none at all."""

# No "from __future__ import annotations": DDP compares a hook's annotation with the class itself.
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

DDPHookName = Literal["none", "bf16", "fp16", "powersgd", "powersgd-rank4", "local", "dear"]

#: Rank of PowerSGD's matrices, by name of the hook; 1 is torch's default.
POWERSGD_RANKS: Mapping[str, int] = MappingProxyType({"powersgd": 1, "powersgd-rank4": 4})

#: Dense steps before PowerSGD begins to compress.
POWERSGD_START = 10

# PowerSGD launches collectives from the callbacks of others. With several buckets their order differs between ranks on
# gloo, which then reads messages of another size: one bucket holds the whole model there.
_ONE_BUCKET_MB = 1 << 20


def _bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP takes torch's hook, by its name, on NCCL only; gloo reduces bfloat16 as well."""
    return bf16_compress_hook(group or dist.distributed_c10d._get_default_group(), bucket)


def _local(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every worker keeps its own gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _AsMatrices:
    """A bucket as PowerSGD can read it: torch's hook takes the length of every tensor, which scalars have not, and
    reshapes it to a matrix, which tensors without elements cannot be."""

    def __init__(self, bucket: dist.GradBucket) -> None:
        self._bucket = bucket

    def gradients(self) -> list[torch.Tensor]:
        return [grad.view(1) if grad.dim() == 0 else grad for grad in self._bucket.gradients() if grad.numel()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


def _power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    shown: Any = _AsMatrices(bucket)
    return powerSGD_hook(state, shown)


def ddp_hook_options(name: DDPHookName, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Arguments of DistributedDataParallel that the hook needs."""
    if name in POWERSGD_RANKS and "nccl" not in dist.get_backend_config(group):
        return {"bucket_cap_mb": _ONE_BUCKET_MB}
    return {}


def register_ddp_hook(ddp: DistributedDataParallel, name: DDPHookName, group: dist.ProcessGroup | None) -> None:
    """Registers the hook called ``name`` on the wrapped model; ``"dear"`` registers its own (:class:`Dear`)."""
    if name == "bf16":
        ddp.register_comm_hook(group, _bf16)
    elif name == "fp16":
        ddp.register_comm_hook(group, fp16_compress_hook)
    elif name == "local":
        ddp.register_comm_hook(None, _local)
    elif name in POWERSGD_RANKS:
        rank = POWERSGD_RANKS[name]
        # torch's default of 1000 dense steps would be most of a short run; its state is not part of checkpoints
        state = PowerSGDState(process_group=group, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
        ddp.register_comm_hook(state, _power_sgd)
