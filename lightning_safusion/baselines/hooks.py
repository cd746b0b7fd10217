"""DDP with one of torch's communication hooks, or with none."""

# No "from __future__ import annotations": DDP compares a hook's annotation with the class itself.
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion.integration.exchange import GradientExchange
from lightning_safusion.lookup import DDPHookName

#: Rank of PowerSGD's matrices, by name of the hook; 1 is torch's default.
POWERSGD_RANKS: Mapping[str, int] = MappingProxyType({"powersgd": 1, "powersgd-rank4": 4})

#: Dense steps before PowerSGD begins to compress.
POWERSGD_START = 10

# PowerSGD launches collectives from the callbacks of others. With several buckets their order differs between ranks on
# gloo, which then reads messages of another size: one bucket holds the whole model there.
_ONE_BUCKET_MB = 1 << 20


class HookExchange(GradientExchange):
    """One of torch's hooks; ``"local"``: every worker keeps its own gradients; ``"none"``: DDP's all-reduce.

    Args:
        name: Of the hook.
        group: The process group that the user has given DDP; None for the default one.
    """

    def __init__(self, name: DDPHookName, group: dist.ProcessGroup | None) -> None:
        self._name = name
        self._group = group

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        many = self._name in POWERSGD_RANKS and not options.get("bucket_cap_mb")
        if many and "nccl" not in dist.get_backend_config(self._group):
            return options | {"bucket_cap_mb": _ONE_BUCKET_MB}
        return options

    def register(self, ddp: DistributedDataParallel) -> None:
        if self._name == "bf16":
            ddp.register_comm_hook(self._group, _bf16)
        elif self._name == "fp16":
            ddp.register_comm_hook(self._group, fp16_compress_hook)
        elif self._name == "local":
            ddp.register_comm_hook(None, _local)
        elif self._name in POWERSGD_RANKS:
            # torch's default of 1000 dense steps would be most of a short run; its state is not part of checkpoints
            rank, start = POWERSGD_RANKS[self._name], POWERSGD_START
            ddp.register_comm_hook(PowerSGDState(self._group, rank, start_powerSGD_iter=start), _power_sgd)


def _bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP takes torch's hook, by its name, on NCCL only; gloo reduces bfloat16 as well."""
    return bf16_compress_hook(group or dist.distributed_c10d._get_default_group(), bucket)


def _local(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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
    matrices: Any = _AsMatrices(bucket)
    return powerSGD_hook(state, matrices)
