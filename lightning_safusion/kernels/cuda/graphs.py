"""Launches that are the same in every window, started as one CUDA graph.

A graph of many kernels takes the host about as long to start as one of them. A device has run them in one stage only
(``races`` of ``python -m lab gpu``), so they are off: ``SAFUSION_CUDA_GRAPHS=1`` turns them on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

#: Environment variable that turns graphs on or off: 1 or 0.
SWITCH = "SAFUSION_CUDA_GRAPHS"

_log = logging.getLogger(__name__)
Work = Callable[[], None]


class Recorded:
    """Work of a device that is started in every window, as a graph where nothing that it depends on has changed.

    Args:
        capture: Makes a graph of work without doing it; returns what starts the graph. None: no graphs.
    """

    def __init__(self, capture: Callable[[Work], Work] | None) -> None:
        self._capture = capture
        self._key: object = None
        self._replay: Work | None = None

    def run(self, key: object, work: Work) -> None:
        """Starts the work.

        Args:
            key: All that it depends on, but for what the device's memory holds: addresses, sizes, numbers.
            work: Starts kernels; takes no new memory when it is started again with an equal key.
        """
        if self._capture is None:
            work()
        elif key != self._key:  # kernels are compiled, and memory is taken, outside of graphs
            self._key, self._replay = key, None
            work()
        else:
            if self._replay is None:
                self._replay = self._captured(self._capture, work)
            self._replay()

    def _captured(self, capture: Callable[[Work], Work], work: Work) -> Work:
        try:
            return capture(work)
        except RuntimeError as error:
            _log.warning("kernels are started one by one, because CUDA makes no graph of them: %s", error)
            self._capture = None
            return work


def capture(work: Work) -> Work:
    """A graph of work, captured on the current stream, which is not the default one."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads use the device meanwhile: NCCL's looks for finished collectives, a loader's pins memory.
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        try:
            graph.capture_end()
        except RuntimeError:  # it leaves the allocator in the state of a capture
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
    return graph.replay


def recorded(device: torch.device) -> Recorded:
    """For launches on a device.

    Raises:
        ValueError: If the environment variable is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {switch!r}: 1 starts selections as CUDA graphs, 0 kernel by kernel")
    return Recorded(capture if switch == "1" and device.type == "cuda" else None)
