"""What every turn of a benchmark begins with: the state that the first one found, hooks that do nothing twice, and no
memory that nothing refers to."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

_RESET_PEAK = "5"  # what Linux takes for "the peak begins anew at what is resident now"


class Beginning:
    """The state of a module and of optimizers that outlive a turn, as the first turn found it, on the CPU. Hooks that
    set the job up run once, those that end it when the benchmark does."""

    def __init__(self, module: LightningModule, data: LightningDataModule | None) -> None:
        self._module = module
        self._values: dict[str, Tensor] = {}
        self._trained: dict[str, bool] = {}
        self._optimizers: WeakKeyDictionary[Optimizer, dict[str, Any]] = WeakKeyDictionary()
        self._owners: list[Any] = [each for each in (module, data) if each is not None]
        self._ends = [each.teardown for each in self._owners]
        self._begun = False
        self._drop_hooks("teardown")

    def unfreeze(self) -> None:
        """Parameters are trained or not as they were at first. Called before DDP finds them."""
        for name, param in self._module.named_parameters():
            if name in self._trained:
                param.requires_grad_(self._trained[name])

    @torch.no_grad()
    def restore(self, trainer: Trainer) -> None:
        """Brings the state back; keeps what is new, such as a cache that a forward pass has made."""
        params = dict(self._module.named_parameters())
        for name, param in params.items():
            self._trained.setdefault(name, param.requires_grad)
        for name, value in {**params, **dict(self._module.named_buffers())}.items():
            first = self._values.setdefault(name, value.detach().cpu().clone())
            if first.shape == value.shape:  # else it has grown, and grows again
                value.copy_(first)
        for optimizer in trainer.optimizers:  # those that a file names are made once
            known = self._optimizers.setdefault(optimizer, copy.deepcopy(optimizer.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(known))

    def done(self) -> None:
        """A turn has ended well: later ones find model and data set up."""
        self._begun = True
        self._drop_hooks("prepare_data", "setup", "configure_model")

    def end(self) -> None:
        """Ends the job, if a turn has begun it."""
        for teardown in self._ends if self._begun else ():
            teardown("fit")

    def _drop_hooks(self, *names: str) -> None:
        for each in self._owners:
            for name in names:
                if hasattr(each, name):
                    setattr(each, name, nothing)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of what a benchmark does not do."""


def begin_peak(device: torch.device) -> None:
    """The peak of the memory begins anew: of the device, or of this process where the device is the CPU."""
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
