"""Times the collectives of a group as a job meets them: alone, one after the other in a queue, and their work for the
processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.simulate.measured import CollectiveSample, CollectiveTimes

# From a message of a few entries to a few megabytes, so that the slope is that of the link.
_SIZES = tuple(64 << bits for bits in range(0, 17, 2))
_REPEATS = 9
_LONG = 1.0  # seconds for all repeats, above which three are enough
_QUEUE = 16  # collectives that are launched at once
_QUEUE_BYTES = 1 << 16  # of all of them, or two: the link is what a queue of larger ones waits for


# Launch of the first, return of the wait for the last, seconds of a core that all other threads of this process took.
_Run = tuple[float, float, float]


def time_collectives(transport: Transport, budget_s: float = 20.0) -> dict[str, CollectiveTimes]:
    """Times all-gathers and all-reduces of CPU tensors on this group and link; blocks all ranks, which return the same.

    Workers share one machine, and so a clock: a collective begins when the last worker has launched it, and ends when
    the mean worker no longer waits.

    Args:
        transport: The communicator.
        budget_s: Seconds after which no larger size is begun.

    Returns:
        ``"allgather"``, by the bytes of one worker's message; ``"allreduce"``, by those of the buffer.
    """
    return {
        "allgather": _times(transport, _gather(transport), budget_s / 2),
        "allreduce": _times(transport, _reduce(transport), budget_s / 2),
    }


def _gather(transport: Transport) -> Callable[[int], Callable[[], Work]]:
    def launcher(nbytes: int) -> Callable[[], Work]:
        message = torch.zeros(nbytes, dtype=torch.uint8)
        return lambda: transport.all_gather(torch.empty(nbytes * transport.world_size, dtype=torch.uint8), message)

    return launcher


def _reduce(transport: Transport) -> Callable[[int], Callable[[], Work]]:
    # a buffer for each: collectives of a queue run side by side
    return lambda nbytes: lambda: transport.all_reduce(torch.zeros(nbytes // 4))


def _times(transport: Transport, launcher: Callable[[int], Callable[[], Work]], budget_s: float) -> CollectiveTimes:
    deadline = time.perf_counter() + budget_s
    samples: list[CollectiveSample] = []
    for nbytes in _SIZES:
        launch = launcher(nbytes)
        late = torch.tensor([float(time.perf_counter() > deadline)])
        transport.all_reduce(late, "max").wait()
        if late.item() and len(samples) > 1:
            break
        queue = max(2, min(_QUEUE, _QUEUE_BYTES // nbytes))
        expected = samples[-1].alone * nbytes / samples[-1].nbytes if samples else 0.0
        repeats = _REPEATS if expected * _REPEATS < _LONG else 3
        _run(transport, launch, 1)  # memory and connections
        samples.append(_sample(transport, nbytes, launch, queue, repeats))
    return CollectiveTimes(tuple(samples))


def _sample(
    transport: Transport, nbytes: int, launch: Callable[[], Work], queue: int, repeats: int
) -> CollectiveSample:
    alone = _medians(transport, [_run(transport, launch, 1) for _ in range(repeats)])
    queued = _medians(transport, [_run(transport, launch, queue) for _ in range(max(1, repeats // 3))])
    gap = max(0.0, (queued[0] - alone[0]) / (queue - 1))
    processor = max(0.0, (queued[1] - alone[1]) / (queue - 1))
    return CollectiveSample(nbytes, alone[0], min(gap, alone[0]), alone[1], processor)


def _medians(transport: Transport, runs: Sequence[_Run]) -> tuple[float, float]:
    """Median seconds and processor seconds of a run, agreed by all ranks."""
    mine = torch.tensor(runs, dtype=torch.float64)
    table = torch.empty(transport.world_size * mine.numel(), dtype=torch.float64)
    transport.all_gather(table, mine.flatten()).wait()
    begin, end, processor = table.view(transport.world_size, len(runs), 3).unbind(-1)
    seconds = (end.mean(0) - begin.max(0).values).tolist()
    return median(seconds), median(processor.mean(0).tolist())


def _run(transport: Transport, launch: Callable[[], Work], count: int) -> _Run:
    # a rank may leave a collective while its last bytes are under way: they must not delay the next one
    transport.all_reduce(torch.zeros(1)).wait()
    before, begin = _processor(), time.perf_counter()
    works = [launch() for _ in range(count)]
    for work in works:
        work.wait()
    end = time.perf_counter()
    return begin, end, _processor() - before


def _processor() -> float:
    """Seconds of a core that the other threads of this process have had, the kernel's work for them included."""
    return time.process_time() - time.thread_time()
