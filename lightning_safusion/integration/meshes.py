"""Tensors that lie on several meshes of a sharded model: how they begin, and how their gradients are clipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_safusion.integration.parameters import params_of
from lightning_safusion.integration.sharded import begin_alike


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
