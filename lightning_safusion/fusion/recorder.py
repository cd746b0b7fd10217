"""Times that one rank has measured (gradients, selections, exchanges, decoding, windows), and their agreement.

Every rank keeps running medians of its own. What is planned with is agreed: a gradient is ready when the slowest worker
has it, while an exchange took as long as the worker that arrived last measured (the others waited for it).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.plan import CollectiveName
from lightning_safusion.fusion.plans.profile import AgreedProfile, fit_or_scale

_SAMPLES = 256  # measurements kept of each operation
_ARRIVALS = 11  # windows that the running median of the arrivals spans
#: Latest windows whose exchanges are fitted: older ones would not show that a link has changed.
RECENT_WINDOWS = 8
# Shape of the local costs before buffers of several sizes were measured: a launch, and a pass over memory.
_LOCAL_SHAPE = LinearCost(40e-6, 1e-10)
_UNKNOWN = LinearCost(-math.inf, -math.inf)


class ProfileRecorder:
    """Running statistics of one rank, without the first windows of a job, which set up communicators and kernels."""

    def __init__(self, num_tensors: int) -> None:
        self.num_tensors = num_tensors  #: in the ready order (L)
        self.windows = 0  #: recorded
        self._arrivals: deque[np.ndarray] = deque(maxlen=_ARRIVALS)
        self._selections: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._decodes: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        # One row per exchange, found by its number: ranks may have read different numbers of results when they agree.
        self._exchanges = np.full((3, _SAMPLES), np.inf)  # number; bytes and collective; seconds
        self._exchanges[:2] = -1.0
        self._num_exchanges = 0
        self._window_starts: deque[int] = deque(maxlen=RECENT_WINDOWS)  # first exchange of each of the latest windows

    def record(self, events: WindowEvents) -> None:
        """Adds a window, without the rounds of a stream, which belong to no buffer."""
        buffers = [buffer for buffer in events.buffers if buffer.collective != "stream"]
        selections = [(each.places.stop, each.elements, each.issued - each.closed) for each in buffers]
        ready = events.ready if events.delays is None else events.ready - events.delays
        self.record_window(ready, selections, delays=not events.beside)
        seconds = service_seconds([each.launched for each in buffers], [each.finished for each in buffers])
        for each, duration in zip(buffers, seconds, strict=True):
            self.record_exchange(each.collective, each.bytes_sent, duration)
            if each.collective == "allgather":
                self.record_decode(each.bytes_sent, each.decoded - each.decode_begin)

    def record_window(
        self,
        arrivals: Sequence[float] | np.ndarray,
        selections: Iterable[tuple[int, int, float]] = (),
        delays: bool = True,
    ) -> None:
        """Adds the arrival times of the gradients in one window, and the selections that delayed them.

        Exchanges recorded from here on, up to the next window, belong to it.

        Args:
            arrivals: Seconds at which each gradient arrived, counted from any origin; NaN if it did not [L].
            selections: ``(place after its last tensor, elements, seconds)`` of each buffer, until its launch.
            delays: Selections ran between the gradients, not beside them: the time of each is subtracted from the
                arrivals after it, so that the profile does not depend on the plan it was measured with.
        """
        times = np.array(arrivals, dtype=np.float64)
        for stop, elements, seconds in selections:
            if delays and _measured(seconds):
                times[stop:] -= seconds
            self._add(self._selections, elements, seconds)
        if not np.isnan(times).all():  # such a window counts too: other ranks may have had gradients in it
            times -= np.nanmin(times)
        self._arrivals.append(times)
        self._window_starts.append(self._num_exchanges)
        self.windows += 1

    def record_exchange(self, collective: CollectiveName, nbytes: int, seconds: float) -> None:
        """Adds one exchange. All ranks record the same exchanges in the same order, at their own pace.

        Args:
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

    def to_vector(self) -> np.ndarray:
        """What this rank has measured, laid out so that the minimum over ranks, number by number, is the agreement.

        Float64, of a length that depends on the number of tensors only. Numbers of which the largest counts are
        negated; what was not measured is infinite.
        """
        arrivals = np.full(self.num_tensors, -np.inf)
        if self._arrivals:
            table = np.stack(self._arrivals)
            measured = ~np.isnan(table).all(axis=0)
            arrivals[measured] = np.nanmedian(table[:, measured], axis=0)
        lines = [fit_or_scale(samples, _LOCAL_SHAPE) or _UNKNOWN for samples in (self._selections, self._decodes)]
        local = np.ravel([(line.fixed, line.per_byte) for line in lines])
        number, code, seconds = self._exchanges
        oldest = self._window_starts[0] if self._window_starts else 0
        seconds = np.where(number >= oldest, seconds, np.inf)
        return np.concatenate([-arrivals, -local, number, -number, code, -code, seconds])

    def agree(
        self,
        transport: Transport,
        prior: Mapping[str, LinearCost],
        device: torch.device | str = "cpu",
        known: AgreedProfile | None = None,
    ) -> AgreedProfile:
        """Agrees on the profile. Collective; blocks; call it between windows.

        ``prior`` and ``known`` are as in :meth:`AgreedProfile.from_minimum`, the same on all ranks.

        Raises:
            ValueError: On all ranks, if none has recorded a gradient.
        """
        minimum = torch.from_numpy(self.to_vector()).to(device)
        transport.all_reduce(minimum, "min").wait()
        profile = AgreedProfile.from_minimum(minimum.cpu().numpy(), self.num_tensors, prior, known)
        # The fits are floating-point sums, whose last bit may depend on a host's processor: rank 0's are used.
        result = torch.from_numpy(profile.to_vector()).to(device)
        transport.broadcast(result, 0).wait()
        return AgreedProfile.from_vector(result.cpu().numpy())


def service_seconds(launched: Sequence[float], finished: Sequence[float]) -> list[float]:
    """Seconds that each exchange had the link, from when it was launched or the one before it ended.

    Times are in launch order on one clock; ``finished`` is NaN where unknown.
    """
    seconds, free = [], -math.inf
    for begin, end in zip(launched, finished, strict=True):
        seconds.append(end - max(begin, free))
        free = max(free, end)
    return seconds


def _measured(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


class WindowSpans:
    """Seconds from the first gradient to the last mean of so many latest windows with one plan, on this rank."""

    def __init__(self, count: int) -> None:
        self._spans: deque[float] = deque(maxlen=count)
        self._settling = True

    @property
    def full(self) -> bool:
        """Whether as many windows as are kept were recorded; the same on all ranks."""
        return len(self._spans) == self._spans.maxlen

    def restart(self) -> None:
        """Another plan is used from the next window on."""
        self._spans.clear()
        self._settling = True

    def add(self, events: WindowEvents) -> None:
        """Adds a window; the first one of a plan allocates its buffers and does not count."""
        if self._settling:
            self._settling = False
            return
        computed = events.ready[~np.isnan(events.ready)]
        self._spans.append(events.drained - float(computed.min()) if len(computed) else math.nan)

    def agree_median(
        self, transport: Transport, device: torch.device | str, beside: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Agrees on the median window, NaN if none was measured. Collective; blocks; call it between windows.

        Ranks begin a window when their own forward pass has ended, and end it together: of each window the shortest
        span counts, that of the rank which began last and did not wait. The median leaves disturbances out.

        Of ``beside`` (float64, of one length on all ranks) the minimum over ranks is returned as well.
        """
        latest = np.full(self._spans.maxlen or 0, np.inf)
        latest[: len(self._spans)] = np.nan_to_num(np.array(self._spans), nan=np.inf)
        shortest = torch.from_numpy(np.concatenate([latest, beside])).to(device)
        transport.all_reduce(shortest, "min").wait()
        agreed, least = np.split(shortest.cpu().numpy(), [len(latest)])
        agreed = agreed[np.isfinite(agreed)]
        return float(np.median(agreed)) if len(agreed) else math.nan, least
