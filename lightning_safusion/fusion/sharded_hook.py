"""The adapter between torch's FSDP2 and the engine: a hook for every group of shards, in the place of an all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_safusion.comm.transport.interface import during
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.hook import GradientHook


class ShardGroup:
    """Parameters that FSDP2 communicates together: how this worker's shards lie in the tensor that a hook gets.

    Raises:
        ValueError: If FSDP2 averages the gradients over replicas itself.
    """

    def __init__(self, module: FSDPModule, names: Mapping[int, str]) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

        self.module = module
        (self._group,) = _param_groups(module)
        if isinstance(self._group.mesh_info, DDPMeshInfo):
            raise ValueError(
                "FSDP2 averages gradients over the replicas of a two-dimensional mesh itself, before a hook sees them: "
                "give fully_shard mesh['shard'] alone, and attach replicate_mesh=mesh['replicate']"
            )
        self._shards = [each for each in self._group.fsdp_params if each.sharded_param.requires_grad]
        self.params: list[Tensor] = [each.sharded_param for each in self._shards]
        self.named = {names[id(each.sharded_param)]: each.sharded_param for each in self._group.fsdp_params}
        self.names = list(self.named)
        self.shapes: list[tuple[int, ...]] = [tuple(each.sharded_size) for each in self._shards]
        padded = [each.padded_sharded_param_size.numel() for each in self._shards]
        self._starts = [sum(padded[:number]) for number in range(len(padded) + 1)]

    def check_replicas(self, ranks: Sequence[int]) -> None:
        """Raises a ValueError if two of these workers, which are to have the same shards, have different ones."""
        sharded = dist.get_process_group_ranks(self._group.mesh_info.shard_process_group)
        if both := sorted(set(sharded) & set(ranks) - {dist.get_rank()}):
            raise ValueError(
                f"ranks {', '.join(map(str, both))} are both among the shards of {', '.join(self.names[:4])} and in "
                "replicate_mesh: give fully_shard mesh['shard'], and attach replicate_mesh=mesh['replicate']"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that a hook gets."""
        policy = self._group.mp_policy
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or self.params[0].dtype
        return dtype

    def check(self, flat: Tensor) -> None:
        """Raises a RuntimeError if a tensor lacks parameters: FSDP2 leaves out those without a gradient."""
        if flat.numel() != self._starts[-1]:
            raise RuntimeError(
                f"some of these parameters got no gradient in this backward pass, or were frozen or unfrozen: "
                f"{', '.join(self.names[:8])}. The gradients of this step are not synchronised. Where a pass "
                "leaves parameters out call the module's set_reduce_scatter_unused_params(True) (torch 2.13); after a "
                "change call bind (SAFusionModelParallelStrategy: change it between epochs). Optimizers that take "
                "turns, each with the others' parameters frozen, need a sharded model each."
            )

    def flat_shards(self, flat: Tensor) -> list[Tensor]:
        """What a tensor has of each parameter, without padding: views [elements of the shard]."""
        sizes = [each.sharded_size.numel() for each in self._shards]
        return [flat[start : start + size] for start, size in zip(self._starts, sizes, strict=False)]

    @property
    def divisor(self) -> float | None:
        """What FSDP2 divides by after a hook."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

        group = self._group
        shards, kind = group._reduce_scatter_process_group, self.params[0].device.type
        factor, forced = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        after: float | None = _get_gradient_divide_factors(shards, None, self.dtype, kind, factor, forced)[1]
        return after

    def becomes_gradient(self, flat: Tensor) -> bool:
        """Whether the tensor that a hook gets is the memory of the gradients, so that it may be written later."""
        own = all(
            param.grad is None and not shard.offload_to_cpu
            for param, shard in zip(self.params, self._shards, strict=True)
        )
        return own and flat.dtype == self.params[0].dtype and self.divisor in (None, 1)

    def deliver(self, means: Tensor, existed: Sequence[bool]) -> None:
        """Writes means into the gradients, or adds them where these ``existed`` before the hook."""
        divisor = self.divisor
        for param, shard, flat, before in zip(self.params, self._shards, self.flat_shards(means), existed, strict=True):
            mean = flat.as_strided(shard.sharded_size, shard.contiguous_sharded_stride)
            if divisor not in (None, 1):
                mean = mean / divisor
            grad = _local(param.grad)
            if before:
                grad.add_(mean.to(grad.device, grad.dtype))
            else:
                grad.copy_(mean)


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    found: list[Any] = [
        each for each in ([state._fsdp_param_group] if several is None else several) if each is not None
    ]
    if len(found) > 1:
        raise ValueError("a module whose parameters lie on several meshes (shard_placement_fn) has no one hook for all")
    return found


def refuse_part(module: Any) -> None:
    """Raises a ValueError if a module is inside of another one that is sharded; FSDP2 knows it in a forward pass."""
    state: Any = module._get_fsdp_state()
    if state._is_root is not False:  # None before the first one
        return
    name = next((repr(each._module_fqn) for each in _param_groups(module)), "a module")
    raise ValueError(
        f"{name} ({type(module).__name__.removeprefix('FSDP')}) is a part of a model that fully_shard has sharded, and "
        "nothing would average the gradients of its other parts over the replicas: give attach the whole model, for "
        "which fully_shard was called last"
    )


def resharded(model: nn.Module) -> Sequence[FSDPModule]:
    """All sharded modules, with their shards: after a forward pass, or with set_reshard_after_backward(False), whole
    parameters may be in their place.
    """
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for module in modules:
        module.reshard()
    return modules


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """All groups of a model, also those whose parameters are frozen now: they may not be so always."""
    modules = resharded(model)
    names = {id(param): name for name, param in model.named_parameters()}
    return [ShardGroup(module, names) for module in modules if _param_groups(module)]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class ShardedHook(GradientHook):
    """Pushes the shards of gradients to the engine, and drains it when the backward pass has ended.

    Where the tensor that FSDP2 hands over becomes the gradient, the means are written into it. Elsewhere what is
    written late would be lost without an error: FSDP2 gets zeros, and the means go to the gradients themselves.

    Args:
        engine, params: See :class:`GradientHook`.
        untrained: Names and parameters that no optimizer has: they are averaged uncompressed.
    """

    def __init__(self, engine: Engine, params: Iterable[Tensor], untrained: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__(engine, params, len({id(param) for _, param in untrained}))
        self._taken: list[tuple[ShardGroup, Tensor, list[bool] | None]] = []  # of this window

    def take(self, group: ShardGroup, flat: Tensor) -> None:
        """A backward pass has come to a group.

        Raises:
            RuntimeError: If it has come to this one before, and not yet to all: means would be those of a part.
        """
        if any(each is group for each, *_ in self._taken):
            missing = self.engine.missing()
            self.reset()
            raise RuntimeError(
                f"gradients of {', '.join(group.names[:8])} came twice before the exchange has ended"
                + (f", and there were none of {', '.join(missing[:8])}" if missing else "")
                + ". The gradients of this step are not synchronised. Run a backward pass that leaves out parameters "
                "inside of no_sync() of what attach has returned."
            )
        if any(getattr(param, "_post_accumulate_grad_hooks", None) for param in group.params):
            raise RuntimeError(
                f"a hook of {group.names[0]} or another parameter (register_post_accumulate_grad_hook) would see its "
                "gradient before it is exchanged: step the optimizer after the backward pass"
            )
        existed = None
        if not group.becomes_gradient(flat):
            existed = [param.grad is not None for param in group.params]
            flat, given = flat.clone(), flat
            given.zero_()
        self._taken.append((group, flat, existed))
        for param, grad in zip(group.params, group.flat_shards(flat), strict=True):
            if (index := self._index.get(id(param))) is None:
                self._beside.append(grad)
            else:
                self.engine.push(index, grad)
        if self.engine.complete and len(self._beside) == self._expected:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch.compiler.disable
    def _finish(self) -> None:
        with torch.no_grad(), during(f"the exchange of gradients in step {self.engine.windows}"):
            self._drain()
        taken, self._taken = self._taken, []
        for group, means, existed in taken:
            if existed is not None:
                group.deliver(means, existed)

    def check_complete(self, synchronised: bool = True) -> None:
        if self._taken:
            self._refuse(self.engine.missing() or ["those that no optimizer has"])

    def reset(self) -> None:
        self._taken = []
        super().reset()
