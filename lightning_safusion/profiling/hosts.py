"""The clocks of several hosts: how far apart they are."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def gather(tensor: Tensor) -> Tensor:
    """Gathers a tensor [N] of all ranks of the default process group into [world_size, N]. A collective."""
    if not dist.is_initialized():
        return tensor[None]
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return torch.stack(everyone)


def meet(device: torch.device, rounds: int = 8) -> np.ndarray:
    """Meets all ranks some times, and records the time before and after. A collective.

    Args:
        device: Where the process group wants its tensors.
        rounds: How often.

    Returns:
        float64 [world_size, 2, rounds]: of each rank, ``perf_counter`` seconds before and after each round.
    """
    # the first collective of a process may open connections
    gather(torch.zeros(1, device=device)).cpu()
    moments = np.empty((2, rounds))
    for i in range(rounds):
        moments[0, i] = perf_counter()
        gather(torch.zeros(1, device=device)).cpu()
        moments[1, i] = perf_counter()
    mine = torch.from_numpy(moments.reshape(-1)).to(device)
    return gather(mine).cpu().numpy().reshape(-1, 2, rounds)


def clock_offsets(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far the clocks of all ranks are ahead of rank 0's.

    Nobody leaves a round before everybody has come to it, so the offset of rank r lies between ``before[r] - after[0]``
    and ``after[r] - before[0]`` of every round. The middle of what all rounds leave is within the returned error of the
    truth. A rank whose interval holds 0 shares its clock with rank 0: no two hosts are started within a millisecond.

    Args:
        moments: float64 [world_size, 2, rounds] of :func:`meet`.

    Returns:
        float64 [world_size], seconds; and float64 [world_size], the largest possible error.
    """
    before, after = moments[:, 0], moments[:, 1]
    low = (before - after[0]).max(axis=1)
    high = (after - before[0]).min(axis=1)
    shared = (low <= 0) & (high >= 0)
    return np.where(shared, 0.0, (low + high) / 2), np.where(shared, 0.0, (high - low) / 2)
