"""Models that FSDP2 shards inside of nodes, and whose gradients are exchanged between them.

Their tensors lie on several meshes: how they begin, and how their gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from lightning_safusion.announce import announce
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.sharded_hook import ShardedHook, ShardGroup, refuse_part, shard_groups
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.parameters import params_of, trained, untrained
from lightning_safusion.integration.wrapped import TAKEN, DenseRules, Wrapped

_MESSAGE_BYTES = 1 << 28  # as DDP's, of weights


class InFSDP(Wrapped):
    """A model that ``fully_shard`` has sharded over one dimension of a mesh; another one has the replicas.

    Parameters that are whole on all workers of tensor parallelism have the same gradient on them, and need the same
    mean: these are averaged uncompressed, since what is selected depends on the worker's other tensors.

    Args:
        model: The root.
        mesh: Of the replicas, one-dimensional.
        prefix: Begins the names of the parameters.
        narrow: Type of what is averaged where nothing is exchanged sparse; None: that of the gradients.

    Raises:
        RuntimeError: If the model is taken, or torch is too old.
        ValueError: If the mesh has another number of dimensions or has shards in it, FSDP2 averages over replicas
            itself, or the model is a part of a sharded one.
    """

    dense = "an all-reduce between the replicas"

    def __init__(self, model: nn.Module, mesh: DeviceMesh, prefix: str = "", narrow: torch.dtype | None = None) -> None:
        if not hasattr(FSDPModule, "set_all_reduce_hook"):
            raise RuntimeError(f"sharded models need torch 2.8 or later, this is {torch.__version__}")
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"replicate_mesh is a DeviceMesh, such as mesh['replicate'], got {type(mesh).__name__}")
        if mesh.ndim != 1:
            raise ValueError(f"replicate_mesh has one dimension, mesh['replicate'], got {mesh.ndim}")
        self.module = model
        self.inner, self.group, self._prefix, self._narrow = self.module, mesh.get_group(), prefix, narrow
        groups = shard_groups(model)
        for each in groups:
            each.check_replicas(dist.get_process_group_ranks(self.group))
        params: list[Any] = [param for each in groups for param in each.named.values()]
        widest: DeviceMesh = max((param.device_mesh for param in params), key=lambda each: each.ndim)
        self._tensor_parallel, self._mesh = widest.ndim > 1, widest
        at: list[int] = list(widest.get_coordinate() or [])
        sizes = list(widest.shape)
        self.place = 0, 1
        for coordinate, size in zip(at, sizes, strict=True):
            self.place = self.place[0] * size + coordinate, self.place[1] * size
        self.options = {
            "shards": str([each.shapes for each in groups]),
            "place among the shards": f"{at} of {sizes}",
        }
        self.refuse_part()
        self._hook: ShardedHook | None = None
        self._syncs = True
        self._partial: dict[int, Tensor] = {}  # sums of passes that exchanged nothing, by group
        self._groups: list[ShardGroup] = []
        if self.module in _taken:
            raise RuntimeError(TAKEN)
        self._follow()
        _taken.add(self.module)

    def refuse_part(self) -> None:
        refuse_part(self.module)

    def _follow(self) -> None:
        """Looks which parameters are trained now."""
        self._groups = set_hooks(self.module, self._reduce)

    @property
    def synchronises(self) -> bool:
        return self._syncs

    def parameters(self) -> Iterable[Tensor]:
        # not those of the module, which are whole between its forward and backward pass
        return [param for group in self._groups for param in group.params]

    def trainable(self) -> list[Tensor]:
        """The sharded parameters that have a gradient now; :meth:`parameters` had one at the latest look."""
        return [param for group in self._groups for param in group.named.values() if param.requires_grad]

    def _exchanged(self, optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
        return [each for each in trained(self.inner, optimizers) if not self._is_alike(each[1])]

    def _is_alike(self, param: Any) -> bool:
        """Whether all workers of tensor parallelism have the whole of a parameter."""
        return self._tensor_parallel and not any(each.is_shard() for each in param.placements[1:])

    def specs(self, optimizers: Sequence[Optimizer], rules: DenseRules) -> tuple[TensorSpec, ...]:
        self._follow()
        shards = {
            id(param): torch.empty(shape, dtype=group.dtype, device="meta", requires_grad=True)
            for group in self._groups
            for param, shape in zip(group.params, group.shapes, strict=True)
        }
        named = [(self._prefix + name, shards[id(param)]) for name, param in self._exchanged(optimizers)]
        return specs_from_parameters(named, *rules)

    def install(self, exchange: EngineExchange, optimizers: Sequence[Optimizer]) -> None:
        params = [param for _, param in self._exchanged(optimizers)]
        alike = [each for each in trained(self.inner, optimizers) if self._is_alike(each[1])]
        if alike:
            announce(
                f"{sum(param.numel() for _, param in alike):,} elements ({', '.join(name for name, _ in alike[:4])}"
                f"{', ...' if alike[4:] else ''}) are averaged uncompressed, because tensor parallelism does not shard "
                "them"
            )
        self._hook = ShardedHook(exchange.engine, params, [*untrained(self.inner, optimizers), *alike])
        exchange.use(self._hook, params)

    def leave(self) -> None:
        self._hook = None

    def release(self) -> None:
        _taken.discard(self.module)

    def gather(self, value: object) -> list[Any]:
        values: list[Any] = [value]
        for group in self._mesh.get_all_groups():
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, values, group=group)
            values = [each for some in found for each in some]
        return values

    def _param(self, name: str) -> Any:
        own = name.removeprefix(self._prefix)
        return next((each.named[own] for each in self._groups if own in each.named), None)

    def whole(self, name: str, local: Tensor) -> Tensor:
        param = self._param(name)
        shape = param.shape + local.shape[param.ndim :]  # complex ones have a dimension more
        stride = torch.empty(shape, dtype=local.dtype, device="meta").stride()
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
        )

    def piece(self, name: str, whole: Tensor) -> Tensor:
        param = self._param(name)
        if param is None or whole.shape[: param.ndim] != param.shape:
            return torch.empty(0, dtype=whole.dtype)  # fits nothing
        shape, offset = compute_local_shape_and_global_offset(whole.shape, param.device_mesh, param.placements)
        return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]

    def _reduce(self, number: int, flat: Tensor) -> None:
        """In the place of an all-reduce over the replicas; ``flat``: a group's mean over the shards, and padding."""
        group = self._groups[number]
        group.check(flat)
        if not self._syncs:
            self._hold(number, group, flat)
            return
        if (earlier := self._partial.pop(number, None)) is not None:
            flat += earlier
        if self._hook is None:
            self._average(flat)
        else:
            self._hook.take(group, flat)

    def _average(self, flat: Tensor) -> None:
        sent = flat if self._narrow is None else flat.to(self._narrow)
        dist.all_reduce(sent, dist.ReduceOp.AVG, group=self.group)
        if sent is not flat:
            flat.copy_(sent)

    def _hold(self, number: int, group: ShardGroup, flat: Tensor) -> None:
        """Adds up what is exchanged later; no gradient is left that was not there."""
        if number in self._partial:
            self._partial[number] += flat
        else:
            self._partial[number] = flat.clone()
        flat.zero_()
        new = [param for param in group.params if param.grad is None]

        def forget() -> None:
            for param in new:
                param.grad = None

        torch.autograd.Variable._execution_engine.queue_callback(forget)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before


def begin_alike(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Gives all workers of a group what the first has of tensors, as DDP does; FSDP2 does not. Collective."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    if held := [each.detach() for each in local if each.numel() and not each.is_meta]:
        dist._broadcast_coalesced(group, held, _MESSAGE_BYTES, 0)


def begin_alike_over(mesh: DeviceMesh, module: nn.Module) -> None:
    """Workers that have the same part of a tensor begin with what the first of them has, as with DDP. Collective."""
    tensors: dict[str, list[Tensor]] = {dimension: [] for dimension in reversed(mesh.mesh_dim_names or ())}
    for tensor in (*module.parameters(), *module.buffers()):
        parts = _parts(tensor)
        for dimension, held in tensors.items():
            if dimension not in parts:
                held.append(tensor)
    for dimension, held in tensors.items():
        if mesh[dimension].size() > 1:
            begin_alike(held, mesh[dimension].get_group())


def _parts(tensor: Tensor) -> set[str]:
    """Dimensions of the mesh over which a tensor is split."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {name for name, each in zip(names, tensor.placements, strict=False) if not each.is_replicate()}


def clip_by_norm(optimizer: Optimizer, clip_val: float) -> None:
    """Clips gradients that lie on several meshes by their common norm."""
    meshes: dict[Any, list[Tensor]] = {}
    for param in params_of(optimizer):
        if param.grad is not None:
            meshes.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    norms = []
    for params in meshes.values():
        norm: Any = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if norms:
        for params in meshes.values():
            nn.utils.clip_grads_with_norm_(params, clip_val, torch.stack(norms).norm())


def set_hooks(model: nn.Module, reduce: Callable[[int, Tensor], None]) -> list[ShardGroup]:
    """Has the gradients of a sharded model handed over by groups, with their number, in place of an all-reduce."""
    groups = shard_groups(model)
    for number, group in enumerate(groups):
        group.module.set_all_reduce_hook(partial(reduce, number))
    return groups


def sharded_roots(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The outermost sharded modules, each with what the names of its parameters begin with."""
    if isinstance(module, FSDPModule):
        return [(prefix, module)]
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        # a compiled module has the names of the one in it
        found += sharded_roots(child, prefix if name == "_orig_mod" else f"{prefix}{name}.")
    return found


_taken: WeakSet[nn.Module] = WeakSet()
