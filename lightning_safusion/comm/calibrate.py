"""Measures what the collectives of a transport cost, and agrees on the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from lightning_safusion.comm.cost import LinearCost, fit_linear
from lightning_safusion.comm.transport.interface import Transport, Work

# Times as long that the largest size must take: disturbances of a busy machine are not taken for a rate.
_RISE = 2.0
_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


def calibrate(
    transport: Transport,
    device: torch.device,
    budget_s: float = 0.5,
    *,
    sizes: Sequence[int] = _SIZES,
    repeats: int = 5,
    slow_s: float = 0.05,
) -> dict[str, LinearCost]:
    """Fits a linear cost to the all-gather and the all-reduce of a transport, by timing them.

    All ranks run the same sequence: rank 0 says how often each size is timed, the slowest rank's times count, and
    rank 0's fit is broadcast, so that all ranks hold the same numbers, bit for bit. Growing stops when the time is
    used up or one operation takes longer than ``slow_s``, but never before larger messages are seen to take longer.
    Blocks all ranks.

    Args:
        transport: The communicator to measure.
        device: Where the buffers of the exchange live.
        budget_s: Seconds that the measurement may take, warm-up excluded. On very slow networks the two
            smallest sizes, and larger ones until the time rises, are timed once even if that takes longer.
        sizes: Bytes to time, rising, multiples of 4.
        repeats: Times that each size is measured at most; the median counts.
        slow_s: Seconds of one operation above which no larger size is tried.

    Returns:
        ``"allgather"``: cost of the bytes of *one rank's* message; ``"allreduce"``: cost of the bytes of the buffer.

    Raises:
        ValueError: If there are fewer than two sizes or they are not rising multiples of 4.
    """
    if len(sizes) < 2 or any(size % 4 for size in sizes) or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
        raise ValueError(f"sizes must be two or more rising multiples of 4 bytes, got {list(sizes)}")
    _time(transport, device, sizes[0], turns=1)  # opens the connections
    deadline = time.perf_counter() + budget_s
    measured: list[list[float]] = []
    for size in sizes:
        turns = _turns(sizes, measured, deadline - time.perf_counter(), repeats, slow_s)
        turns = int(_agree(transport, device, [turns])[0])
        if turns == 0:
            break
        measured.append(_time(transport, device, size, turns))
    slowest = torch.tensor(measured, dtype=torch.float64, device=device)
    transport.all_reduce(slowest, "max").wait()
    fits = [fit_linear(list(zip(sizes, column, strict=False))) for column in slowest.t().tolist()]
    agreed = _agree(transport, device, [number for fit in fits for number in (fit.fixed, fit.per_byte)])
    return {"allgather": LinearCost(*agreed[:2]), "allreduce": LinearCost(*agreed[2:])}


def _turns(sizes: Sequence[int], measured: list[list[float]], remaining: float, repeats: int, slow_s: float) -> int:
    """How often the next size should be timed, by this rank's clock; 0 ends the measurement."""
    if not measured:
        return repeats
    required = 0 if len(measured) > 1 and _rises(measured) else 1
    if max(measured[-1]) > slow_s:
        return required
    growth = sizes[len(measured)] / sizes[len(measured) - 1]
    expected = max(growth * sum(measured[-1]), 1e-9)
    return max(required, min(repeats, int(remaining / expected)))


def _rises(measured: list[list[float]]) -> bool:
    """Whether the time of both collectives is seen to depend on the size: without that there is no rate."""
    return all(last > _RISE * first for first, last in zip(measured[0], measured[-1], strict=True))


def _agree(transport: Transport, device: torch.device, numbers: Sequence[float]) -> list[float]:
    """Rank 0's numbers, on all ranks."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    transport.broadcast(tensor).wait()
    agreed: list[float] = tensor.tolist()
    return agreed


def _time(transport: Transport, device: torch.device, nbytes: int, turns: int) -> list[float]:
    """Median seconds of an all-gather of messages, and of an all-reduce of a buffer, of ``nbytes`` bytes."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    gathered = torch.zeros(nbytes * transport.world_size, dtype=torch.uint8, device=device)
    buffer = torch.zeros(nbytes // 4, device=device)
    token = torch.zeros(1, device=device)

    def timed(launch: Callable[[], Work]) -> float:
        # a rank may leave a collective while its last bytes are under way: they must not delay the next one
        transport.all_reduce(token).wait()
        return _seconds(device, launch)

    times = [
        (
            timed(lambda: transport.all_gather(gathered, message)),
            timed(lambda: transport.all_reduce(buffer)),
        )
        for _ in range(turns)
    ]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _seconds(device: torch.device, launch: Callable[[], Work]) -> float:
    _synchronize(device)
    start = time.perf_counter()
    launch().wait()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
