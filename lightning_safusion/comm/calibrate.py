"""Measures what the collectives of a transport cost, and agrees on the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from lightning_safusion.comm.cost import LinearCost, fit_linear
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.kernels.fields import MESSAGE_BYTES

_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)  # bytes
_LARGE = (8 << 20, 64 << 20)  # on devices as well: up to 1 MiB their libraries show latency, and no rate
_MOST_GATHERED = 256 << 20  # bytes of all messages of an all-gather; with many workers each is smaller than its size
_REPEATS = 5  # of each size at most
_SLOW_S = 0.05  # seconds of one operation above which no larger size is timed
# Times as long that the largest size must take, so that a disturbance of a busy machine does not pass for a rate.
_RISE = 2.0


def calibrate(transport: Transport, device: torch.device, budget_s: float = 0.5) -> dict[str, LinearCost]:
    """Fits a linear cost to the all-gather and the all-reduce of a transport, by timing them.

    All ranks run the same sequence: rank 0 decides how often each size is timed, the slowest rank's times count, and
    rank 0's fit is broadcast, so that all ranks hold the same numbers, bit for bit. Sizes grow (to 1 MiB, on devices to
    64 MiB) until the time is used up or one operation is slow, but at least until larger messages take longer. Blocks
    all ranks.

    Args:
        transport: The communicator to measure.
        device: Where the buffers of the exchange live.
        budget_s: Seconds that the measurement may take, warm-up excluded. On very slow networks the two smallest
            sizes, and larger ones until the time rises, are timed once even if that takes longer.

    Returns:
        ``"allgather"``: cost of the bytes of *one rank's* message; ``"allreduce"``: cost of the bytes of the buffer.
    """
    sizes = _sizes(device)
    _time(transport, device, sizes[0], turns=1)  # opens the connections
    deadline = time.perf_counter() + budget_s
    measured: list[list[float]] = []
    for size in sizes:
        turns = int(_agree(transport, device, [_turns(measured, deadline - time.perf_counter(), sizes)])[0])
        if turns == 0:
            break
        measured.append(_time(transport, device, size, turns))
    slowest = torch.tensor(measured, dtype=torch.float64, device=device)
    transport.all_reduce(slowest, "max").wait()
    messages = [_message(size, transport.world_size) for size in sizes]
    columns = zip((messages, sizes), slowest.t().tolist(), strict=True)
    fits = [fit_linear(list(zip(nbytes, column, strict=False))) for nbytes, column in columns]
    agreed = _agree(transport, device, [number for fit in fits for number in (fit.fixed, fit.per_byte)])
    return {"allgather": LinearCost(*agreed[:2]), "allreduce": LinearCost(*agreed[2:])}


def _sizes(device: torch.device) -> Sequence[int]:
    return _SIZES if device.type == "cpu" else (*_SIZES, *_LARGE)


def _message(size: int, world_size: int) -> int:
    """Bytes of one rank's message where an all-reduce has a buffer of ``size`` bytes."""
    return min(size, _MOST_GATHERED // world_size // MESSAGE_BYTES * MESSAGE_BYTES)


def _turns(measured: list[list[float]], remaining: float, sizes: Sequence[int]) -> int:
    """How often the next size is timed; 0 ends it. ``measured``: seconds of both collectives for each size so far."""
    if not measured:
        return _REPEATS
    # without a rise in the time of both collectives there is no rate
    rises = all(last > _RISE * first for first, last in zip(measured[0], measured[-1], strict=True))
    required = 0 if rises else 1
    if max(measured[-1]) > _SLOW_S:
        return required
    growth = sizes[len(measured)] / sizes[len(measured) - 1]
    expected = max(growth * sum(measured[-1]), 1e-9)
    return max(required, min(_REPEATS, int(remaining / expected)))


def _agree(transport: Transport, device: torch.device, numbers: Sequence[float]) -> list[float]:
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    transport.broadcast(tensor).wait()
    return tensor.tolist()


def _time(transport: Transport, device: torch.device, nbytes: int, turns: int) -> list[float]:
    """Median seconds of an all-gather of messages, and of an all-reduce of a buffer, of ``nbytes`` bytes."""
    message = torch.zeros(_message(nbytes, transport.world_size), dtype=torch.uint8, device=device)
    gathered = torch.zeros(len(message) * transport.world_size, dtype=torch.uint8, device=device)
    buffer = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    token = torch.zeros(1, dtype=torch.float32, device=device)

    def timed(launch: Callable[[], Work]) -> float:
        # a rank may leave a collective while its last bytes are under way: they must not delay the next one
        transport.all_reduce(token).wait()
        _synchronize(device)
        start = time.perf_counter()
        launch().wait()
        _synchronize(device)
        return time.perf_counter() - start

    launches = (lambda: transport.all_gather(gathered, message), lambda: transport.all_reduce(buffer))
    times = [[timed(launch) for launch in launches] for _ in range(turns)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
