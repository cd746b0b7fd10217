"""Mean of gradients that are sparse tensors already (``nn.Embedding(sparse=True)``): exchanged as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport


def coo_means(transport: Transport, grads: Sequence[Tensor]) -> list[Tensor]:
    """Averages sparse gradients over all ranks, as DDP does; nothing is selected and nothing kept.

    Ranks hold different numbers of rows, so these are exchanged first and the messages padded to the longest. Waits
    for the device. Rows are added in rank order.

    Args:
        transport: Communicator; all ranks pass the same number of gradients, in the same order.
        grads: Sparse COO gradients.

    Returns:
        The means, coalesced, of the dtype of each gradient.
    """
    if not grads:
        return []
    mine = [grad.coalesce() for grad in grads]
    rows = torch.tensor([grad.values().shape[0] for grad in mine], device=mine[0].device)
    everyone = torch.empty(transport.world_size * len(mine), dtype=rows.dtype, device=rows.device)
    transport.all_gather(everyone, rows).wait()
    counts = everyone.view(transport.world_size, len(mine)).t().tolist()
    return [_mean(transport, grad, ranks) for grad, ranks in zip(mine, counts, strict=True)]


def _mean(transport: Transport, grad: Tensor, counts: list[int]) -> Tensor:
    longest = max(counts)
    if longest == 0:
        return grad
    indices = _gather(transport, grad.indices().t(), longest)
    values = _gather(transport, grad.values(), longest)
    kept_indices = torch.cat([part[:count] for part, count in zip(indices, counts, strict=True)])
    kept_values = torch.cat([part[:count] for part, count in zip(values, counts, strict=True)])
    kept_values = kept_values / transport.world_size
    return torch.sparse_coo_tensor(kept_indices.t(), kept_values, grad.shape, check_invariants=False).coalesce()


def _gather(transport: Transport, rows: Tensor, longest: int) -> list[Tensor]:
    """Every rank's rows [n, ...], each padded to ``longest`` rows."""
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    received = rows.new_empty((transport.world_size, *padded.shape))
    transport.all_gather(received.view(-1), padded.view(-1)).wait()
    return list(received.unbind())
