"""The memory of a process: its peak in a turn, and giving it back."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path

import torch

_RESET_PEAK = "5"  # what Linux takes for "the peak begins anew at what is resident now"


def begin_peak(device: torch.device) -> None:
    """The peak begins anew: of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def peak(device: torch.device) -> int | None:
    """Most bytes since :func:`begin_peak`: allocated by torch on a CUDA device, else resident in memory; None where the
    system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def give_back(device: torch.device) -> None:
    """Gives memory that nothing refers to any more back to the device and the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library than GNU's has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
