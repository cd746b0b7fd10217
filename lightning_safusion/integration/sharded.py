"""Models that FSDP2 shards inside of nodes, and whose gradients are exchanged between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.sharded_hook import ShardedHook, ShardGroup, shard_groups
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.parameters import trained, untrained
from lightning_safusion.integration.wrapped import TAKEN, DenseRules


class InFSDP:
    """A model that ``fully_shard`` has sharded over one dimension of a mesh; another one has the replicas.

    Args:
        model: The root.
        mesh: Of the replicas, one-dimensional.

    Raises:
        RuntimeError: If the model is taken.
        ValueError: If the mesh has another number of dimensions, or FSDP2 averages over replicas itself.
    """

    find_unused = static = False

    def __init__(self, model: FSDPModule, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"replicate_mesh has one dimension, mesh['replicate'], got {mesh.ndim}")
        self.module: nn.Module = model  # type: ignore[assignment]  # fully_shard makes one of a module
        self.inner, self.group = self.module, mesh.get_group()
        self.options = {"shards": str([each.shapes for each in shard_groups(model)])}
        self._hook: ShardedHook | None = None
        self._syncs = True
        self._partial: dict[int, Tensor] = {}  # sums of passes that exchanged nothing, by group
        self._groups: list[ShardGroup] = []
        if self.module in _taken:
            raise RuntimeError(TAKEN)
        self._follow()
        _taken.add(self.module)

    def _follow(self) -> None:
        """Looks which parameters are trained now."""
        self._groups = shard_groups(self.module)  # type: ignore[arg-type]  # a FSDPModule
        for number, group in enumerate(self._groups):
            group.module.set_all_reduce_hook(partial(self._reduce, number))

    @property
    def synchronises(self) -> bool:
        """See :class:`Wrapped`, as all below."""
        return self._syncs

    def parameters(self) -> Iterable[Tensor]:
        # not those of the module, which are whole between its forward and backward pass
        return [param for group in self._groups for param in group.params]

    def specs(self, optimizers: Sequence[Optimizer], rules: DenseRules) -> tuple[TensorSpec, ...]:
        self._follow()
        wanted = {id(param) for _, param in trained(self.inner, optimizers)}
        shards = {
            id(param): torch.empty(shape, dtype=group.dtype, device="meta", requires_grad=True)
            for group in self._groups
            for param, shape in zip(group.params, group.shapes, strict=True)
            if id(param) in wanted
        }
        named = [(name, shards[id(param)]) for name, param in self.inner.named_parameters() if id(param) in shards]
        return specs_from_parameters(named, *rules)

    def install(self, exchange: EngineExchange, optimizers: Sequence[Optimizer]) -> None:
        params = [param for _, param in trained(self.inner, optimizers)]
        self._hook = ShardedHook(exchange.engine, params, untrained(self.inner, optimizers))
        exchange.use(self._hook, params)

    def leave(self) -> None:
        self._hook = None

    def release(self) -> None:
        _taken.discard(self.module)

    def refuse_join(self) -> None:
        """Nothing: FSDP2 has none."""

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
            dist.all_reduce(flat, dist.ReduceOp.AVG, group=self.group)
        else:
            self._hook.take(group, flat)

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


_taken: WeakSet[nn.Module] = WeakSet()
