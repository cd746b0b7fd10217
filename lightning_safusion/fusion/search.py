"""A search for buffers that asks the clock alone: one plan after the other is used for a while, and measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lightning_safusion.comm.transport import Transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.merging import cut_search
from lightning_safusion.fusion.spans import WindowSpans


class CutSearch:
    """Cupcake's search for cuts (MLSys 2023) in a job that trains meanwhile.

    All ranks take the same steps, since they agree on what each plan has taken. The search is a function of these
    times: they are all that a checkpoint keeps of it.

    Args:
        tensors: Tensors (L), at least 1.
        groups: Largest number of groups.
        tolerance: Share of the time that a further cut must save.
        windows: Windows by which each plan is judged, after a first one that does not count.

    Attributes:
        stops: The groups in use, as the stop of each.
        over: Whether these are the best ones found.
        measured: Agreed seconds of the plans tried so far.
    """

    def __init__(self, tensors: int, groups: int, tolerance: float, windows: int) -> None:
        self._steps = cut_search(tensors, groups, tolerance)
        self._spans = WindowSpans(windows)
        self.stops = next(self._steps)
        self.over = False
        self.measured: list[float] = []

    def add(self, events: WindowEvents) -> bool:
        """Takes in a window with the plan in use; returns whether it has been seen often enough."""
        self._spans.add(events)
        return self._spans.full

    def advance(self, transport: Transport, device: torch.device) -> float:
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
            self.replay([seconds])
        return seconds

    def replay(self, measured: Iterable[float]) -> None:
        """Takes the steps that follow from these seconds."""
        for seconds in measured:
            self.measured.append(float(seconds))
            try:
                self.stops = self._steps.send(float(seconds))
            except StopIteration as end:
                self.stops, self.over = end.value, True
