"""Remarks on a run: how much of the exchange is exposed, and what another choice would change.

Predictions come from the agreed costs of the plan (see :class:`GroupCosts`): measured step + predicted finish of the
alternative - predicted finish of the plan in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Literal, get_args

from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import DDP_BUCKET, GroupCosts, ddp_buckets
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.fusion.slowest import LEAST_SHARE
from lightning_safusion.literal import plural
from lightning_safusion.profiling.figures import StepFigures
from lightning_safusion.profiling.overlap_file import Overlap
from lightning_safusion.systems import sharded_names
from lightning_safusion.tools.batches import better_batches

_HIDDEN = 0.02  # share of the step below which the exchange counts as hidden
_DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)

Level = Literal["warning", "hint", "good"]


@dataclass(frozen=True)
class Advice:
    """A sentence or two. ``"good"``: nothing to do; ``"hint"``: could be better; ``"warning"``: something is wrong."""

    level: Level
    text: str


@dataclass(frozen=True)
class Prediction:
    """Predicted steps with another plan or other costs."""

    measured: StepFigures  # means over ranks
    plan: Plan  # in use
    costs: GroupCosts  # from which it was made

    def step(self, plan: Plan, costs: GroupCosts) -> float:
        """Seconds of a step; not less than those of a step that exchanges nothing."""
        change = predict_finish(plan, costs) - predict_finish(self.plan, self.costs)
        return max(self.measured.step_s - self.measured.exposed_s, self.measured.step_s + change)


def advise(overlap: Overlap, missing_rate: float | None = None) -> list[Advice]:
    """Remarks on a run, warnings first; ``missing_rate`` is None if it was not sampled."""
    mean, plan, costs = overlap.ranks.mean, overlap.plan, overlap.costs
    if overlap.plain_ddp is not None:
        return [Advice("good", f"Plain DDP exchanges the gradients: {overlap.plain_ddp}.")]
    if isnan(mean.exposed_s) or overlap.density is None:
        return [Advice("warning", "No exchange was recorded: train for more steps, or record more of them.")]
    remarks, shorter = [], False
    if plan is not None and costs is not None and predictable(plan, costs):
        now = Prediction(mean, plan, costs)
        better = [*_density(now, overlap.density), *_regrouping(now)]
        remarks, shorter = [_against_ddp(now), *better], bool(better)
    remarks += [*_exposure(mean, shorter), *_missing(missing_rate), *_straggler(overlap)]
    if "replicate_size" in overlap.settings:  # the model is sharded inside of replicas
        remarks = [replace(each, text=sharded_names(each.text)) for each in remarks]
    return sorted(remarks, key=lambda remark: get_args(Level).index(remark.level))


def predictable(plan: Plan, costs: GroupCosts) -> bool:
    """Whether the cost model covers the plan: not streams, which each worker fills alone, and not a single worker."""
    return costs.world_size > 1 and all(group.collective != "stream" for group in plan.groups)


def ddp_plan(costs: GroupCosts, bucket_bytes: float = DDP_BUCKET) -> Plan:
    """The buckets of plain DDP: dense, closed when they hold ``bucket_bytes``."""
    stops = ddp_buckets(costs.dense_bytes, bucket_bytes, bucket_bytes)
    return Plan.from_stops(stops, "allreduce")


def scaled(costs: GroupCosts, *, sparse: float = 1.0, dense: float = 1.0) -> GroupCosts:
    """The costs with other message sizes: factors on the sparse and the dense bytes."""
    return replace(
        costs,
        sparse_bytes=tuple(nbytes * sparse for nbytes in costs.sparse_bytes),
        dense_bytes=tuple(nbytes * dense for nbytes in costs.dense_bytes),
    )


def _exposure(mean: StepFigures, shorter: bool) -> Iterator[Advice]:
    """``shorter``: another hint says how to shorten the step."""
    share = mean.exposed_s / mean.step_s if mean.step_s > 0 else 0.0
    text = f"{mean.exposed_s * 1e3:.1f} ms of exchange are exposed, {share:.1%} of a step."
    if share <= _HIDDEN:
        yield Advice("good", f"The exchange hides behind the backward pass: {text}")
    elif not shorter:
        yield Advice("hint", f"{text} Larger batches hide more of it; accumulate_grad_batches exchanges less often.")


def _against_ddp(now: Prediction) -> Advice:
    fp32, bf16 = (now.step(ddp_plan(now.costs, DDP_BUCKET * f), scaled(now.costs, dense=f)) for f in (1.0, 0.5))
    ratio = bf16 / now.measured.step_s
    predicted = f"plain DDP {fp32 * 1e3:.1f} ms, DDP with bf16 compression {bf16 * 1e3:.1f} ms"
    if ratio >= 1.05:
        return Advice("good", f"At this bandwidth bf16 DDP would be {ratio:.1f} times slower (predicted: {predicted}).")
    if ratio <= 0.95:
        return Advice(
            "warning",
            f"bf16 DDP would be {1 / ratio:.1f} times faster here (predicted: {predicted}): use "
            'collective="auto", or system="ddp-bf16".',
        )
    return Advice("hint", f"bf16 DDP would be about as fast (predicted: {predicted}).")


def _density(now: Prediction, density: float) -> Iterator[Advice]:
    """The lowest density that still saves time, or the highest that costs none."""
    if not any(group.collective == "allgather" for group in now.plan.groups) or not 0 < density < 1:
        return
    step_s = now.measured.step_s
    steps = {d: now.step(now.plan, scaled(now.costs, sparse=d / density)) for d in _DENSITIES}
    useful = [d for d in _DENSITIES if d < density and steps[d] < 0.98 * step_s]
    free = [d for d in _DENSITIES if d > density and steps[d] <= 1.01 * step_s]
    hidden = now.measured.exposed_s <= _HIDDEN * step_s
    if useful and not hidden:
        best = max(useful, key=lambda d: (round(-steps[d] / step_s, 2), d))
        saved = now.measured.bytes_sent * (1 - best / density)
        yield Advice(
            "hint",
            f"density {best:g} would save {saved / 1e6:.2f} MB per worker and step, and make steps "
            f"{step_s / steps[best]:.2f} times faster (predicted); check the accuracy.",
        )
    if free and hidden:
        yield Advice("hint", f"density {max(free):g} would cost no time here (predicted), and lose less.")


def _regrouping(now: Prediction) -> Iterator[Advice]:
    best = plan_optimal(now.costs)
    faster = now.measured.step_s / now.step(best, now.costs)
    if best != now.plan and faster >= 1.02:
        yield Advice(
            "hint",
            f"{plural(len(best.groups), 'buffer')} in place of {len(now.plan.groups)} would make steps {faster:.2f} "
            'times faster (predicted): use fusion="adaptive".',
        )


def _missing(rate: float | None) -> Iterator[Advice]:
    if rate:
        yield Advice(
            "warning",
            f"{rate:.1%} of the gradient tensors send nothing in a step: they are selected after fusion. "
            'scope="tensor" selects from every tensor.',
        )


def _straggler(overlap: Overlap) -> Iterator[Advice]:
    """By the planner's reviews; where it has made none, by the recorded steps."""
    slow, times, (rank, skew) = overlap.slow_worker, overlap.workers, overlap.ranks.slowest
    if slow is not None and times is not None:
        yield Advice(
            "warning",
            f"In this run {slow}. Look at its data loader, at other jobs on its machine and at its clock rate, or give "
            'it a smaller batch, with weighting="samples".',
        )
        yield from _batches(times.own_s)
    elif times is None and skew > LEAST_SHARE * overlap.ranks.mean.step_s:
        yield Advice(
            "hint",
            f"All workers wait for rank {rank}, whose own work takes {skew * 1e3:.1f} ms longer than that of the "
            "median worker: look at its data loading and its machine.",
        )
        yield from _batches([each.work_s for each in overlap.ranks.ranks])


def _batches(seconds: Sequence[float]) -> Iterator[Advice]:
    """Batches by which all workers would take as long, from the seconds that they take with equal ones."""
    if better := better_batches(seconds):
        yield Advice("hint", f"Workers with equal batches would end together with {better}.")
