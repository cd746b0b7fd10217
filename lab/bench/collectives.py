"""Times the collectives of a group of workers on CPUs: alone, and several launched at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from lab.clock.costs import QueuedSample, QueuedTimes
from lightning_safusion.comm.transport.interface import Transport, Work

# Bytes of a collective, from a message of a few entries to a few megabytes, so that the slope is that of the link.
_SIZES = tuple(64 << bits for bits in range(0, 17, 2))
_REPEATS = 9
_LONG = 1.0  # seconds for all repeats, above which three are enough
_QUEUE = 16  # collectives that are launched at once
_QUEUE_BYTES = 1 << 16  # of all of them, or two: the link is what a queue of larger ones waits for


def time_collectives(transport: Transport, budget_s: float = 20.0) -> dict[str, QueuedTimes]:
    """Times all-gathers and all-reduces of CPU tensors on this group and link: alone, and several launched at once.

    Workers share one machine, and so a clock: a collective begins when the last worker has launched it, and ends when
    the mean worker no longer waits. Blocks all ranks, which return the same.

    Args:
        transport: The communicator.
        budget_s: Seconds after which no larger size is begun.

    Returns:
        ``"allgather"``, by the bytes of one worker's message; ``"allreduce"``, by those of the buffer.
    """

    message = torch.zeros(_SIZES[-1], dtype=torch.uint8)

    def gather(nbytes: int) -> Work:
        gathered = torch.empty(nbytes * transport.world_size, dtype=torch.uint8)
        return transport.all_gather(gathered, message[:nbytes])

    def reduce(nbytes: int) -> Work:
        return transport.all_reduce(torch.zeros(nbytes // 4, dtype=torch.float32))

    return {
        "allgather": _times(transport, gather, budget_s / 2),
        "allreduce": _times(transport, reduce, budget_s / 2),
    }


def _times(transport: Transport, launch: Callable[[int], Work], budget_s: float) -> QueuedTimes:
    deadline = time.perf_counter() + budget_s
    samples: list[QueuedSample] = []
    for nbytes in _SIZES:
        late = torch.tensor([float(time.perf_counter() > deadline)], dtype=torch.float32)
        transport.all_reduce(late, "max").wait()
        if late.item() and len(samples) > 1:
            break
        queue = max(2, min(_QUEUE, _QUEUE_BYTES // nbytes))
        expected = samples[-1].seconds * nbytes / samples[-1].nbytes if samples else 0.0
        repeats = _REPEATS if expected * _REPEATS < _LONG else 3
        _run(transport, partial(launch, nbytes), 1)  # memory and connections
        alone, alone_processor = _medians(transport, partial(launch, nbytes), 1, repeats)
        queued, queued_processor = _medians(transport, partial(launch, nbytes), queue, max(1, repeats // 3))
        gap = max(0.0, (queued - alone) / (queue - 1))
        processor = max(0.0, (queued_processor - alone_processor) / (queue - 1))
        samples.append(QueuedSample(nbytes, alone, min(gap, alone), alone_processor, processor))
    return QueuedTimes(tuple(samples))


def _medians(transport: Transport, launch: Callable[[], Work], count: int, repeats: int) -> tuple[float, float]:
    """Median seconds and processor seconds of ``count`` collectives at once, agreed by all ranks."""
    mine = torch.tensor([_run(transport, launch, count) for _ in range(repeats)], dtype=torch.float64)
    table = torch.empty(transport.world_size * mine.numel(), dtype=torch.float64)
    transport.all_gather(table, mine.flatten()).wait()
    begin, end, processor = table.view(transport.world_size, repeats, 3).unbind(-1)
    seconds = (end.mean(0) - begin.max(0).values).tolist()
    return median(seconds), median(processor.mean(0).tolist())


def _run(transport: Transport, launch: Callable[[], Work], count: int) -> tuple[float, float, float]:
    """Launch of the first, return of the wait for the last, seconds of a core that all other threads took."""
    # a rank may leave a collective while its last bytes are under way: they must not delay the next one
    transport.all_reduce(torch.zeros(1, dtype=torch.float32)).wait()
    before, begin = _others(), time.perf_counter()
    works = [launch() for _ in range(count)]
    for work in works:
        work.wait()
    end = time.perf_counter()
    return begin, end, _others() - before


def _others() -> float:
    """Seconds of a core that the other threads of this process have had, the kernel's work for them included."""
    return time.process_time() - time.thread_time()
