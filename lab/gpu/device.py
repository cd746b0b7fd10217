"""The device of a stage: its clock, its memory, and work that holds it up; on the CPU, what stands for them."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from lab.gpu.stages import UnfitError
from lightning_safusion.kernels.cuda import serves_buffers

# Cycles of a device that do nothing: some 20 ms, in which the host submits all work of a window.
_HELD = 30_000_000


class Device:
    """Where a stage runs.

    Args:
        rehearse: The CPU stands for it.

    Attributes:
        device: The first CUDA device, or the CPU.
        cuda: Whether it is one.

    Raises:
        UnfitError: If Triton cannot start on the device: all that follows would be about PyTorch's operations.
    """

    def __init__(self, rehearse: bool) -> None:
        self.cuda = not rehearse
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            need_kernels(self.device)

    def moment(self) -> Any:
        """When the current stream gets here."""
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments; waits for the second."""
        if not self.cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def wait(self) -> None:
        """Until all work is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def hold(self, cycles: int = _HELD) -> None:
        """Keeps the current stream busy, so that the host is ahead of the device and no launch waits for it."""
        if self.cuda:
            torch.cuda._sleep(cycles)

    def median(
        self, work: Callable[[], object], repetitions: int, before: Callable[[], object] = lambda: None
    ) -> float:
        """Median seconds of the current stream for some work that the host has submitted before it begins.

        Args:
            work: It.
            repetitions: How often.
            before: Done before each, not timed.
        """
        times = []
        for _ in range(repetitions):
            before()
            self.hold()
            begin = self.moment()
            work()
            times.append(self.seconds(begin, self.moment()))
        return statistics.median(times)

    def clear(self) -> None:
        """Frees what the last model has left."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Bytes in use now; 0 on the CPU, where nobody counts."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def peak(self, work: Callable[[], object]) -> int:
        """Most bytes in use while some work is done, above those before it."""
        self.wait()
        before = self.allocated()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before if self.cuda else 0

    def copy_rate(self, numel: int, repetitions: int = 20) -> float:
        """Bytes per second, read and written, of a copy of so many float32 numbers."""
        source = torch.zeros(numel, device=self.device)
        target = torch.empty_like(source)
        return 8 * numel / self.median(lambda: target.copy_(source), repetitions)


def need_kernels(device: torch.device) -> None:
    """Raises :class:`UnfitError`, with what Triton says, unless the fused kernels serve a device."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        serving = serves_buffers(device)
    if not serving:
        why = "; ".join(str(warning.message) for warning in said) or "Triton is not installed"
        raise UnfitError(
            f"The fused kernels do not start on {device}, so nothing was measured: PyTorch's operations would be. {why}"
        )
