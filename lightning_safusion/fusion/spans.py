"""How long backward windows take with one plan, agreed by all ranks."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import torch

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.events import WindowEvents


class WindowSpans:
    """Seconds from the first gradient to the last mean of the latest windows with one plan, on this rank.

    Args:
        count: Windows kept.
    """

    def __init__(self, count: int) -> None:
        self._spans: deque[float] = deque(maxlen=count)
        self._settling = True

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def full(self) -> bool:
        """Whether as many windows as are kept have been seen; the same on all ranks."""
        return len(self._spans) == self._spans.maxlen

    def restart(self) -> None:
        """Another plan is used from the next window on."""
        self._spans.clear()
        self._settling = True

    def add(self, events: WindowEvents) -> None:
        """Takes in a window; the first one of a plan allocates its buffers and does not count."""
        if self._settling:
            self._settling = False
            return
        computed = events.ready[~np.isnan(events.ready)]
        self._spans.append(events.drained - float(computed.min()) if len(computed) else math.nan)

    def agree_median(self, transport: Transport, device: torch.device | str) -> float:
        """Agrees on how long a window takes. Collective; blocks; call it between windows.

        Ranks begin a window when their own forward pass has ended, and end it together: of each window the shortest
        span counts, that of the rank which began last and waited for nobody. The median over windows leaves
        disturbances out.

        Args:
            transport: Communicator on which no other rank is doing anything else.
            device: Where the transport wants its tensors.

        Returns:
            The median; NaN if no window was measured. The same on all ranks, bit for bit.
        """
        latest = np.full(self._spans.maxlen or 0, np.inf)
        latest[: len(self._spans)] = np.nan_to_num(np.array(self._spans), nan=np.inf)
        shortest = torch.from_numpy(latest).to(device)
        transport.all_reduce(shortest, "min").wait()
        agreed = shortest.cpu().numpy()
        agreed = agreed[np.isfinite(agreed)]
        return float(np.median(agreed)) if len(agreed) else math.nan
