"""Which parts of a job have no fused kernels on a device, by name: what :class:`FusedPath` leaves to PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lightning_safusion.comm.catalogue import Collective
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.fusion.fused import RESIDUALS
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.fusion.quota import tensor_quotas
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.kernels.cuda import MOST_ELEMENTS
from lightning_safusion.kernels.cuda.tables import KINDS
from lightning_safusion.sparsify.basic import TopK


def left_to_torch(settings: EngineSettings, specs: Sequence[TensorSpec], collective: Collective) -> list[str]:
    """What PyTorch's operations do for a job because the kernels do not know it; empty if they serve all of it.

    Args:
        settings: Of the job.
        specs: Its tensors.
        collective: That carries its buffers.
    """
    exchange, found = collective.exchange, []
    if type(settings.memory) not in RESIDUALS:
        found.append(f"memory={settings.memory.name!r}")
    if settings.offload:
        found.append("offload=True")
    if settings.scope == "group":
        found.append("scope='group'")
    if exchange not in (SparseAllGather, ShardedExchange) or settings.fusion.streams:
        found.append(
            f"fusion={settings.fusion.name!r}" if settings.fusion.streams else f"collective={settings.collective!r}"
        )
    elif exchange is ShardedExchange and type(settings.compressor) is not TopK:
        found.append(f"compressor={settings.compressor.name!r} with shards")
    if not _has_kernels(settings, specs):
        found.append(f"wire={settings.wire!r} at a density of {settings.density(0, 0):.3g}")
    unknown = {spec.dtype for spec in specs} - {*KINDS}
    return found + [f"gradients in {str(dtype).removeprefix('torch.')}" for dtype in sorted(unknown, key=str)]


def _has_kernels(settings: EngineSettings, specs: Sequence[TensorSpec]) -> bool:
    """Whether kernels write and read messages of the wire format, for the whole model."""
    quotas = tensor_quotas(Layout(tuple(specs)), settings.compressor, settings.density(0, 0))
    sparse = ~quotas.dense
    numel = sum(spec.numel for spec, own in zip(specs, sparse, strict=True) if own)
    count = int(quotas.counts[sparse].sum())
    if not count:
        return True
    parts = 1 + numel // MOST_ELEMENTS  # buffers are shorter than all tensors together may be
    numel, count = numel // parts, max(1, count // parts)
    codec = resolve_codec(settings.wire, numel, count, torch.float32)
    ends = np.array([0]), np.array([numel])
    return isinstance(codec, EliasFanoCodec) and codec.message(*ends, codec.nbytes, 0, 0) is not None
