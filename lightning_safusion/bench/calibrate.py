"""Fits what the simulator needs to know, on the workers and links of a benchmark, with the job that they train."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.cost import LinearCost, fit_linear
from lightning_safusion.comm.torch_transport import default_transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.simulate.calibration import Calibration
from lightning_safusion.strategy import SAFusionStrategy

#: The system whose steps are looked at: sparse, eight tensors in a buffer, so that buffers of several sizes are seen.
CALIBRATED = "saf-inter"
# Up to a few megabytes, so that the slope is that of the link; a 100 Mbit/s link carries the largest in a second.
_SIZES = tuple(1 << bits for bits in range(12, 23))
_SECONDS = 20.0


class LocalCosts(Callback):
    """Samples what selection and decoding cost this rank, and at the end times the collectives.

    Args:
        pipe: Takes the calibration when training has ended.
        skip_windows: Windows at the beginning that do not count.
    """

    def __init__(self, pipe: Connection, skip_windows: int) -> None:
        self._pipe = pipe
        self._skip = skip_windows
        self._windows: list[WindowEvents] = []

    def observe(self, events: WindowEvents) -> None:
        """Takes in a window."""
        self._windows.append(events)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, SAFusionStrategy):
            trainer.strategy.add_observer(self)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        transport = default_transport()
        lines = calibrate(transport, device, _SECONDS, sizes=_SIZES, repeats=9, slow_s=2.0)
        transport.close()
        select, decode, entry_bytes = local_costs(self._windows[self._skip :], trainer.world_size)
        source = (
            f"fitted on {trainer.world_size} workers ({torch.distributed.get_backend()}, {device.type}): collectives "
            f"timed alone, selection and decoding in {len(self._windows) - self._skip} steps of {CALIBRATED}"
        )
        self._pipe.send(
            Calibration(
                trainer.world_size,
                lines["allgather"],
                lines["allreduce"],
                select,
                decode,
                entry_bytes,
                device.type == "cpu",
                source,
            )
        )


def local_costs(windows: Sequence[WindowEvents], workers: int) -> tuple[LinearCost, LinearCost, float]:
    """What selection and decoding cost.

    Args:
        windows: With sparse buffers of several sizes.
        workers: In the group.

    Returns:
        Seconds of selection, packing and launch by the elements of a buffer; seconds of decoding by the entries of all
        workers in it; bytes of an entry.

    Raises:
        RuntimeError: If no buffer travelled sparse.
    """
    sparse = [[b for b in events.buffers if b.collective == "allgather" and b.capacity > 0] for events in windows]
    buffers = [buffer for window in sparse for buffer in window]
    if not buffers:
        raise RuntimeError("nothing to calibrate: no buffer travelled sparse. Give a density below 1.")
    select = [[(b.elements, b.issued - b.closed) for b in window] for window in sparse]
    decode = [[(workers * b.capacity, b.decoded - b.arrived) for b in window] for window in sparse]
    entry_bytes = sum(b.bytes_sent for b in buffers) / sum(b.capacity for b in buffers)
    return _line(select), _line(decode), entry_bytes


def _line(windows: Sequence[Sequence[tuple[float, float]]]) -> LinearCost:
    """A line through ``(size, seconds)`` of buffers, scaled so that it says the median of what windows take in all.

    The fit looks at most buffers, not at their sum, which is larger where times have long tails.
    """
    line = fit_linear([sample for window in windows for sample in window])
    said = median(sum(line(size) for size, _ in window) for window in windows)
    scale = median(sum(seconds for _, seconds in window) for window in windows) / said if said > 0 else 1.0
    return LinearCost(line.fixed * scale, line.per_byte * scale)
