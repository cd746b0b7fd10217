"""Which parts of a job have no fused kernels on a device, by name: what :class:`FusedPath` leaves to PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_safusion.comm.catalogue import Collective
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import value_format
from lightning_safusion.fusion.fused import RESIDUALS
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.kernels.cuda.tables import KINDS
from lightning_safusion.sparsify.basic import TopK


def left_to_torch(settings: EngineSettings, specs: Sequence[TensorSpec], collective: Collective) -> list[str]:
    """What PyTorch's operations do in all buffers of a job because the kernels do not know it; empty if nothing.

    Of which buffers kernels do not write the messages is known only when these are planned: see :class:`FusedPath`.
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
    layout, width = settings.wire.rpartition("-")[0], value_format(settings.wire).width
    if width < 4 or layout not in ("", EliasFanoCodec.layout):
        found.append(f"wire={settings.wire!r}")
    unknown = {spec.dtype for spec in specs} - {*KINDS}
    return found + [f"gradients in {str(dtype).removeprefix('torch.')}" for dtype in sorted(unknown, key=str)]
