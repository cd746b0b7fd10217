"""A callback that configures how buffer sizes follow measured times, and logs the planner's decisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import Unpack, override

from lightning_safusion.callbacks.base import StrategyCallback
from lightning_safusion.fusion.plans.adaptive import Tuned
from lightning_safusion.fusion.plans.cadence import Cadence, CadenceOptions
from lightning_safusion.fusion.plans.pricing import Bounds
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.literal import plural
from lightning_safusion.strategy import SAFusionStrategy


class BufferSizeTuner(StrategyCallback):
    """Sizes the buffers of any policy that counts tensors while the job runs, and logs every decision.

    Works on ``fusion="adaptive"`` (systems ``safusion``, ``safusion-paper`` and ``fgbuff``; without this callback it
    sizes itself in the same way, with the defaults below) and on ``"aligned"`` and ``"behind"``, whose fixed number
    of tensors becomes the start. In a review all ranks agree on the measured times, and predict from them the time of
    the plan in use and of the best of the policy's plans. A new plan is kept if windows (first gradient to last mean)
    are shorter with it by the clock than before. Otherwise the old one comes back, and until the costs have changed a
    further change must promise that much more. All ranks decide alike. The state is part of the strategy's checkpoint:
    a resumed job continues, also in the middle of a trial. With ``Trainer(deterministic=True)`` nothing is measured
    and no size changes; with plain DDP there are no buffers.

    After each decision these keys are logged to every logger, and a change also as a line on rank 0:

    ============================  =====================================================================================
    ``safusion/buffers``          buffers of the plan in use from here on
    ``safusion/predicted_gain``   share of the window that the newer plan saves by the agreed costs
    ``safusion/measured_gain``    share of the window that it has saved by the clock, when its trial ends
    ``safusion/window_s``         seconds, median window with the plan in use before the decision
    ============================  =====================================================================================

    Args:
        cadence: When plans are reviewed, and how large a gain is worth a change.
        options: Arguments of the cadence, one by one; deprecated.
        min_elements: Elements of the model's tensors that a buffer holds at least; the last one may hold fewer.
        max_elements: Elements that it holds at most, except for one larger tensor alone. None: no bound.

    Attributes:
        decisions: All decisions of this fit, on every rank.

    Raises:
        ValueError: If a number is out of range.

    Example::

        tuner = BufferSizeTuner(Cadence(every=100), max_elements=2**24)
        Trainer(strategy=SAFusionStrategy(system="behind"), callbacks=[tuner])
    """

    _purpose = "sizes the buffers of"
    _serves = SAFusionStrategy

    def __init__(
        self,
        cadence: Cadence | None = None,
        min_elements: int = 0,
        max_elements: int | None = None,
        **options: Unpack[CadenceOptions],
    ) -> None:
        self.cadence = Cadence.of("BufferSizeTuner", cadence, **options)
        self.bounds = Bounds(min_elements, max_elements).check()
        self.decisions: list[Decision] = []

    @override
    def _begin(self, strategy: EngineReadings, trainer: Trainer, module: LightningModule) -> None:
        policy = strategy.settings.fusion
        policy = policy.policy if isinstance(policy, Tuned) else policy  # of an earlier fit
        try:
            tuned = Tuned(policy, self.cadence, self.bounds)
        except ValueError as error:
            raise MisconfigurationException(f"BufferSizeTuner: {error}.") from error
        strategy.settings = replace(strategy.settings, fusion=tuned)  # the engine is made later
        self.decisions = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._say_idle(self._strategy(trainer))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._follow(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        strategy = self._strategy(trainer)
        latest = self.decisions[-1] if self.decisions else None
        new = list(takewhile(lambda decision: decision is not latest, reversed(strategy.decisions)))
        for decision in reversed(new):
            self.decisions.append(decision)
            values = {
                "buffers": decision.buffers,
                "predicted_gain": decision.predicted,
                "measured_gain": decision.measured,
                "window_s": decision.seconds,
            }
            self._log(trainer, values)
            if decision.action != "stay":
                rank_zero_info(f"BufferSizeTuner: window {decision.window}: {describe(decision)}.")
        if not self._said and self.decisions and strategy.plan is None:
            self._say_idle(strategy)  # plain DDP has taken over

    def _say_idle(self, strategy: EngineReadings) -> None:
        aside = strategy.figures()["plain_ddp"]
        if aside is not None:
            self._say(f"tunes nothing: plain DDP is used, because {aside}")
        elif torch.are_deterministic_algorithms_enabled():
            self._say("tunes nothing: a deterministic training measures no times; sizes are those of the policy")


def describe(decision: Decision) -> str:
    """A decision as a sentence."""
    buffers, rival = plural(decision.buffers, "buffer"), plural(decision.rival, "buffer")
    now = "" if decision.seconds is None else f"{decision.seconds * 1e3:.1f} ms"
    if decision.action == "dense":
        return f"everything dense in {buffers} instead of {rival}, since plain DDP should be faster: it is tried"
    if decision.action == "switch":
        if decision.predicted is None:
            return f"{buffers} instead of {rival}, which no longer fit"
        now = now or "not measured"
        return f"{buffers} instead of {rival}: a window ({now}) should take {_less(decision.predicted)}"
    if decision.action in ("keep", "revert"):
        outcome = f"{buffers} stay" if decision.action == "keep" else f"back to {buffers} from {rival}"
        if decision.measured is None:
            return f"{outcome}: no window was measured, or the residual is not empty yet"
        promised = "" if decision.predicted is None else f" ({_less(decision.predicted)} predicted)"
        return f"{outcome}: a window took {now}, {_less(decision.measured)}{promised}"
    if decision.action == "stay":
        if not decision.predicted:
            return f"{buffers} stay: no other plan would take less time"
        return f"{buffers} stay: a window in another plan of {rival} would take {_less(decision.predicted)}"
    return f"{buffers} from now on"


def _less(gain: float) -> str:
    return f"{100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'}"
