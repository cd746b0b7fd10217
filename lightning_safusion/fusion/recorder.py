"""Times that one rank has measured (of gradients, selections, exchanges, decoding), and their agreement over all ranks.

Every rank keeps running medians of its own. What is planned with is agreed: a gradient is ready when the slowest worker
has it, while an exchange took as long as the worker that arrived last saw (the others waited for it).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.fit import fit_or_scale
from lightning_safusion.fusion.plans.plan import CollectiveName
from lightning_safusion.fusion.plans.profile import AgreedProfile

_SAMPLES = 256  # measurements kept of each operation
#: Latest windows whose exchanges are fitted: of a link that changes, older ones would tell what it was.
RECENT_WINDOWS = 8
# Shape of the local costs as long as buffers of one size only were measured: a launch, and a pass over memory.
_SELECT_SHAPE = LinearCost(40e-6, 1e-10)
_DECODE_SHAPE = LinearCost(40e-6, 1e-10)


class SelectionTime(NamedTuple):
    """The selection of one buffer, its packing and launch: between two gradients on the thread of the backward pass,
    or on a stream beside it.

    Args:
        stop: Place after the last tensor of the buffer.
        elements: Elements selected from.
        seconds: Duration.
    """

    stop: int
    elements: int
    seconds: float


class ProfileRecorder:
    """Running statistics of one rank. Plain numbers in; no clock, no tensor.

    Leave out the first windows of a job: they set up communicators and warm up kernels.

    Args:
        num_tensors: Tensors in the ready order (L).
        history: Windows that the running median of the arrivals spans.
        max_kinds: Kinds of window kept; the one not seen for longest is dropped first.
    """

    def __init__(self, num_tensors: int, history: int = 11, max_kinds: int = 16) -> None:
        self.num_tensors = num_tensors
        self._history = history
        self._max_kinds = max_kinds
        self._arrivals: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()
        self._windows: dict[Hashable, int] = {}
        self._selections: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._decodes: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        # One row per exchange, found by its number: ranks may have read different numbers of results when they agree.
        self._exchanges = np.full((3, _SAMPLES), np.inf)  # number; bytes and collective; seconds
        self._exchanges[:2] = -1.0
        self._num_exchanges = 0
        self._window_starts: deque[int] = deque(maxlen=RECENT_WINDOWS)  # first exchange of each of the latest windows

    def record_window(
        self,
        kind: Hashable,
        arrivals: Sequence[float] | np.ndarray,
        selections: Iterable[SelectionTime] = (),
        delays: bool = True,
    ) -> None:
        """Adds the gradients' arrival times in one window, at best with the selections that delayed them.

        Exchanges recorded from here on, up to the next window, belong to it.

        Args:
            kind: Names windows that have the same fresh tensors, such as the set of their places.
            arrivals: Seconds at which each gradient arrived, counted from any origin; NaN if it did not [L].
            selections: Selections of the window.
            delays: They ran between the gradients: the time of each is taken off the arrivals behind it, so that the
                profile does not depend on the plan it was measured with.

        Raises:
            ValueError: If the number of arrivals is not L.
        """
        times = np.array(arrivals, dtype=np.float64)
        if times.shape != (self.num_tensors,):
            raise ValueError(f"expected one arrival time for each of {self.num_tensors} tensors, got {times.shape}")
        for selection in selections:
            if delays and _measured(selection.seconds):
                times[selection.stop :] -= selection.seconds
            self._add(self._selections, selection.elements, selection.seconds)
        if not np.isnan(times).all():  # such a window still counts: other ranks may have seen gradients in it
            times -= np.nanmin(times)
        self._arrivals.setdefault(kind, deque(maxlen=self._history)).append(times)
        self._arrivals.move_to_end(kind)
        self._window_starts.append(self._num_exchanges)
        self._windows[kind] = self._windows.get(kind, 0) + 1
        if len(self._arrivals) > self._max_kinds:
            dropped, _ = self._arrivals.popitem(last=False)
            del self._windows[dropped]

    def record_exchange(self, collective: CollectiveName, nbytes: int, seconds: float) -> None:
        """Adds one exchange. All ranks record the same exchanges in the same order, at their own pace.

        Args:
            collective: What carried the buffer.
            nbytes: One rank's message (all-gather) or the buffer (all-reduce), bytes.
            seconds: Time on the link (see :func:`service_seconds`); NaN where this rank has no measurement.
        """
        row = self._num_exchanges % _SAMPLES
        code = 2 * nbytes + (collective == "allreduce")
        self._exchanges[:, row] = (self._num_exchanges, code, seconds if _measured(seconds) else np.inf)
        self._num_exchanges += 1

    def record_decode(self, nbytes: int, seconds: float) -> None:
        """Adds the decoding of one sparse exchange, by the bytes of one rank's message."""
        self._add(self._decodes, nbytes, seconds)

    @staticmethod
    def _add(samples: deque[tuple[float, float]], size: int, seconds: float) -> None:
        if _measured(seconds):
            samples.append((float(size), seconds))

    def windows(self, kind: Hashable) -> int:
        """Windows of this kind recorded."""
        return self._windows.get(kind, 0)

    def to_vector(self, kind: Hashable) -> np.ndarray:
        """What this rank knows, laid out so that the minimum over ranks, number by number, is the agreement.

        Numbers of which the largest counts are negated; what was not measured is infinite.

        Returns:
            float64, of a length that depends on the number of tensors only.
        """
        history = self._arrivals.get(kind)
        arrivals = np.full(self.num_tensors, -np.inf)
        if history:
            table = np.stack(history)
            measured = ~np.isnan(table).all(axis=0)
            arrivals[measured] = np.nanmedian(table[:, measured], axis=0)
        local = np.full(4, -np.inf)
        for place, samples, shape in ((0, self._selections, _SELECT_SHAPE), (2, self._decodes, _DECODE_SHAPE)):
            line = fit_or_scale(samples, shape)
            if line is not None:
                local[place : place + 2] = line.fixed, line.per_byte
        number, code, seconds = self._exchanges
        oldest = self._window_starts[0] if self._window_starts else 0
        seconds = np.where(number >= oldest, seconds, np.inf)
        return np.concatenate([-arrivals, -local, number, -number, code, -code, seconds])


def record_events(recorder: ProfileRecorder, kind: Hashable, events: WindowEvents) -> None:
    """Adds all that was taken down of a window, a stream's rounds excepted: those belong to no buffer.

    Args:
        recorder: This rank's statistics.
        kind: As in :meth:`ProfileRecorder.record_window`.
        events: The window.
    """
    buffers = [buffer for buffer in events.buffers if buffer.collective != "stream"]
    selections = [SelectionTime(each.places.stop, each.elements, each.issued - each.closed) for each in buffers]
    recorder.record_window(kind, events.ready, selections, delays=not events.beside)
    seconds = service_seconds([each.launched for each in buffers], [each.finished for each in buffers])
    for each, duration in zip(buffers, seconds, strict=True):
        recorder.record_exchange(each.collective, each.bytes_sent, duration)
        if each.collective == "allgather":
            recorder.record_decode(each.bytes_sent, each.decoded - each.arrived)


def service_seconds(launched: Sequence[float], finished: Sequence[float]) -> list[float]:
    """Time that each exchange had the link, from when it was launched or the one before it ended.

    Args:
        launched: Launch times in launch order, seconds on one clock.
        finished: End times of the same exchanges; NaN where unknown.
    """
    seconds, free = [], -math.inf
    for begin, end in zip(launched, finished, strict=True):
        seconds.append(end - max(begin, free))
        free = max(free, end)
    return seconds


def _measured(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def agree(
    recorder: ProfileRecorder,
    transport: Transport,
    kind: Hashable,
    prior: Mapping[str, LinearCost],
    device: torch.device | str = "cpu",
    known: AgreedProfile | None = None,
) -> AgreedProfile:
    """Agrees on the profile of one kind of window. Collective; blocks; call it between windows.

    Args:
        recorder: This rank's statistics.
        transport: Communicator on which no other rank is doing anything else.
        kind: The same on all ranks.
        prior: The same on all ranks, such as the result of a calibration.
        device: Where the transport wants its tensors.
        known: What was agreed before, the same on all ranks.

    Raises:
        ValueError: On all ranks, if none has recorded a window of this kind.
    """
    minimum = torch.from_numpy(recorder.to_vector(kind)).to(device)
    transport.all_reduce(minimum, "min").wait()
    profile = AgreedProfile.from_minimum(minimum.cpu().numpy(), recorder.num_tensors, prior, known)
    # The fits are floating-point sums, whose last bit may depend on a host's processor: rank 0's are used.
    result = torch.from_numpy(profile.to_vector()).to(device)
    transport.broadcast(result, 0).wait()
    return AgreedProfile.from_vector(result.cpu().numpy())
