"""From the tensors, quotas and messages of a job to the numbers that planning gets."""

from __future__ import annotations

import numpy as np

from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.fusion.buffers import BufferPool
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.costs import JobShape
from lightning_safusion.fusion.quota import TensorQuotas

# Of a buffer, by which bytes of an entry are told: formats of positions differ for spans of billions.
_CODEC_ELEMENTS = 1 << 24


def job_shape(layout: Layout, quotas: TensorQuotas, pool: BufferPool) -> JobShape:
    """What planning knows of a job.

    Args:
        layout: Its tensors in ready order.
        quotas: What each may send.
        pool: Knows the wire format, the collective and the device.
    """
    return JobShape(
        numels=tuple(np.diff(layout.edges).tolist()),
        widths=tuple(spec.dtype.itemsize for spec in layout.specs),
        quotas=tuple(quotas.counts.tolist()),
        world_size=pool.transport.world_size,
        entry_bytes=_entry_bytes(layout, quotas, pool.wire),
        hybrid=pool.collective.dense_lane,
        device=str(pool.device),
    )


def _entry_bytes(layout: Layout, quotas: TensorQuotas, wire: str) -> float:
    """Bytes on the wire per selected element, for a buffer with the model's mean density."""
    sparse = ~quotas.dense
    capacity = int(quotas.counts[sparse].sum())
    if not capacity:
        return 0.0
    return wire_entry_bytes(wire, int(np.diff(layout.edges)[sparse].sum()), capacity)


def wire_entry_bytes(wire: str, numel: int, entries: int) -> float:
    """Bytes of an entry, position included, in a buffer that sends ``entries`` of ``numel`` elements, or such a share.

    Args:
        wire: Wire format by name.
        numel: Elements.
        entries: Those of them that are sent, at least 1.
    """
    scale = min(1.0, _CODEC_ELEMENTS / numel)
    numel, entries = max(1, int(numel * scale)), max(1, int(entries * scale))
    return message_bytes(wire, numel, entries) / entries
