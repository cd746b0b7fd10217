"""Records moments of steps when they happen, and makes timelines of them later."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_safusion.fusion.clock import Clock, Mark
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.profiling.timeline import Phase, PhaseName, StepTimeline, WindowTimeline


@dataclass(eq=False)
class _Marks:
    """A step whose marks are not yet seconds."""

    begin: Mark
    phases: list[tuple[PhaseName, Mark, Mark]] = field(default_factory=list)
    number: int = -1
    end: Mark = None


class StepRecorder:
    """Records the moments of a training loop, and as an ``Observer`` the events of every window.

    Marks are of one clock; nothing waits for the device before :meth:`take`. The order of calls is that of a training
    loop: :meth:`batch_start`, then :meth:`before_backward`, :meth:`after_backward`, :meth:`before_optimizer` and
    :meth:`after_optimizer` in any number, then :meth:`batch_end`.
    """

    def __init__(self) -> None:
        self._step: _Marks | None = None  # under way
        self._done: list[_Marks] = []
        self._windows: list[WindowEvents] = []
        self._last: Mark = None  # the latest moment of the batch
        self._idle: Mark | None = None  # the end of the batch before, if only loading lies between
        self._optimizing: Mark | None = None  # the beginning of an optimizer's step
        self._stepped = False  # its end is known

    def observe(self, events: WindowEvents) -> None:
        """Adds a window."""
        self._windows.append(events)

    def batch_start(self, mark: Mark) -> None:
        """A batch is there, and its forward pass begins."""
        if self._step is None:
            self._step = _Marks(mark if self._idle is None else self._idle)
        if self._idle is not None:
            self._step.phases.append(("data", self._idle, mark))
        self._last = mark

    def before_backward(self, mark: Mark) -> None:
        """A backward pass begins; the time since the latest moment was forward."""
        self._add("forward", self._last, mark)
        # optimizers that run forward and backward passes themselves (LBFGS)
        self._last, self._optimizing = mark, None

    def after_backward(self, mark: Mark) -> None:
        """A backward pass has ended, exchange included."""
        self._add("backward", self._last, mark)
        self._last = mark

    def before_optimizer(self, mark: Mark) -> None:
        """An optimizer's step begins."""
        self._last = self._optimizing = mark
        self._stepped = False

    def after_optimizer(self, mark: Mark) -> None:
        """An optimizer's step has ended. Where one optimizer's step calls another's, the last call counts."""
        if self._step is not None and self._optimizing is not None:
            if self._stepped:
                self._step.phases.pop()
            self._add("optimizer", self._optimizing, mark)
            self._stepped = True
        self._last = mark

    def batch_end(self, mark: Mark, step: int | None) -> None:
        """A batch has ended.

        Args:
            mark: Now.
            step: Number of the step that it ended; None if its gradients are accumulated further.
        """
        if self._optimizing is not None and not self._stepped:  # the optimizer has no hook after its step
            self.after_optimizer(mark)
        self._optimizing = None
        self._idle = mark
        if self._step is not None and step is not None:
            self._step.number, self._step.end = step, mark
            self._done.append(self._step)
            self._step = None

    def skip(self, mark: Mark) -> None:
        """A batch of a step that is not recorded has ended; the next one may be."""
        self._step, self._idle, self._optimizing = None, mark, None

    def pause(self) -> None:
        """Validation or a report comes between this batch and the next one: the time between is not loading."""
        self._idle = None

    def clear(self) -> None:
        """Forgets everything."""
        self._step = self._idle = self._optimizing = None
        self._done, self._windows = [], []

    def take(self, clock: Clock, before: int) -> list[StepTimeline]:
        """Returns the recorded steps with a smaller number than ``before``, and forgets them.

        Waits for the device where their moments have not come yet.
        """
        ready = [step for step in self._done if step.number < before]
        self._done = [step for step in self._done if step.number >= before]
        timelines = []
        for step in ready:
            begin, end = clock.seconds(step.begin), clock.seconds(step.end)
            inside = [events for events in self._windows if begin < events.drained <= end]
            phases = tuple(Phase(name, clock.seconds(b), clock.seconds(e)) for name, b, e in step.phases)
            timelines.append(StepTimeline(step.number, begin, end, phases, tuple(map(WindowTimeline.of, inside))))
        if timelines:
            self._windows = [events for events in self._windows if events.drained > timelines[-1].end]
        return timelines

    def _add(self, name: PhaseName, begin: Mark, end: Mark) -> None:
        if self._step is not None:
            self._step.phases.append((name, begin, end))
