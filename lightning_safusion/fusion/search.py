"""A search for buffers that asks the clock alone: one plan after the other is used for a while, and measured."""

from __future__ import annotations

import math

import torch

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.searching import CutSearch
from lightning_safusion.fusion.spans import WindowSpans


class TimedSearch:
    """Measures the plans of a search. All ranks take the same steps: they agree on what each plan has taken.

    Args:
        search: Proposes them.
    """

    def __init__(self, search: CutSearch) -> None:
        self.search = search
        self._spans = WindowSpans(search.windows)

    def add(self, events: WindowEvents) -> bool:
        """Takes in a window with the plan in use; returns whether it has been seen often enough."""
        self._spans.add(events)
        return self._spans.full

    def advance(self, transport: Transport, device: torch.device | str) -> float:
        """Agrees on what the plan in use has taken, and goes on to the next one. Collective; blocks.

        Args:
            transport: Communicator on which no other rank is doing anything else.
            device: Where the transport wants its tensors.

        Returns:
            Median seconds of a window, the same on all ranks; NaN if none was measured: the plan is then tried again.
        """
        seconds = self._spans.agree_median(transport, device)
        self._spans.restart()
        if math.isfinite(seconds):
            self.search.replay([seconds])
        return seconds
