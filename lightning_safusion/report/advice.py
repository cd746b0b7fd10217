"""Remarks on a job's figures: how much of the exchange is exposed, and what another choice would change.

Everything is predicted with the agreed costs from which the plan was made (see :class:`GroupCosts`), and added to the
measured time of a step: measured step + predicted finish of the alternative - predicted finish of the plan in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import DDP_BUCKET, GroupCosts, ddp_buckets
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.pricing import predict_finish

_HIDDEN = 0.02  # share of the step below which the exchange counts as hidden
_DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)

Level = Literal["warning", "hint", "good"]


@dataclass(frozen=True)
class Advice:
    """A sentence or two. ``"good"``: nothing to do; ``"hint"``: could be better; ``"warning"``: something is wrong."""

    level: Level
    text: str


@dataclass(frozen=True)
class JobFigures:
    """A job's measured figures.

    Args:
        step_s: Seconds of a step, median.
        exposed_s: Seconds of it in which the backward pass stood still for an exchange.
        density: Density asked for.
        bytes_sent: Bytes that one worker sends in a step.
        missing_rate: Share of the gradient tensors of which no element was sent; None if that was not counted.
        slowest_rank: Rank whose own work takes longest, and how much longer than the median's, in seconds; None if
            that was not measured.
        plan: The plan in use; None if there is none, as with plain DDP.
        costs: From which it was made.
    """

    step_s: float
    exposed_s: float
    density: float
    bytes_sent: float
    missing_rate: float | None = None
    slowest_rank: tuple[int, float] | None = None
    plan: Plan | None = None
    costs: GroupCosts | None = None


def advise(figures: JobFigures) -> list[Advice]:
    """Remarks on a job, warnings first."""
    remarks, plan, costs = [_exposure(figures)], figures.plan, figures.costs
    if plan is not None and costs is not None and predictable(plan, costs):
        remarks += [_against_ddp(figures, costs), *_density(figures, plan, costs), *_regrouping(figures, plan, costs)]
    remarks += [*_missing(figures), *_straggler(figures)]
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


def step_with(figures: JobFigures, plan: Plan, costs: GroupCosts) -> float:
    """Predicted seconds of a step with another plan or other costs; not less than a step that exchanges nothing.

    Raises:
        ValueError: If the figures have no plan or no costs.
    """
    if figures.plan is None or figures.costs is None:
        raise ValueError("predictions need the plan in use and its costs")
    change = predict_finish(plan, costs) - predict_finish(figures.plan, figures.costs)
    return max(figures.step_s - figures.exposed_s, figures.step_s + change)


def _exposure(figures: JobFigures) -> Advice:
    share = figures.exposed_s / figures.step_s if figures.step_s > 0 else 0.0
    text = f"{figures.exposed_s * 1e3:.1f} ms of exchange are exposed, {share:.1%} of a step."
    if share <= _HIDDEN:
        return Advice("good", f"The exchange hides behind the backward pass: {text}")
    return Advice("hint", text)


def _against_ddp(figures: JobFigures, costs: GroupCosts) -> Advice:
    full, half = (step_with(figures, ddp_plan(costs, DDP_BUCKET * f), scaled(costs, dense=f)) for f in (1.0, 0.5))
    ratio = half / figures.step_s
    predicted = f"plain DDP {full * 1e3:.1f} ms, DDP with bf16 compression {half * 1e3:.1f} ms"
    if ratio >= 1.05:
        return Advice("good", f"At this bandwidth bf16 DDP would be {ratio:.1f} times slower (predicted: {predicted}).")
    if ratio <= 0.95:
        return Advice(
            "warning",
            f"bf16 DDP would be {1 / ratio:.1f} times faster here (predicted: {predicted}): use "
            'collective="auto", or strategy="ddp" with bf16_compress_hook.',
        )
    return Advice("hint", f"bf16 DDP would be about as fast (predicted: {predicted}).")


def _density(figures: JobFigures, plan: Plan, costs: GroupCosts) -> Iterator[Advice]:
    """The lowest density that still saves time, or the highest that costs none."""
    if not any(group.collective == "allgather" for group in plan.groups) or not 0 < figures.density < 1:
        return
    steps = {d: step_with(figures, plan, scaled(costs, sparse=d / figures.density)) for d in _DENSITIES}
    if figures.exposed_s > _HIDDEN * figures.step_s:
        useful = [d for d in _DENSITIES if d < figures.density and steps[d] < 0.98 * figures.step_s]
        if useful:
            best = max(useful, key=lambda d: (round(-steps[d] / figures.step_s, 2), d))
            saved = figures.bytes_sent * (1 - best / figures.density)
            yield Advice(
                "hint",
                f"density {best:g} would save {saved / 1e6:.2f} MB per worker and step, and make steps "
                f"{figures.step_s / steps[best]:.2f} times faster (predicted); check the accuracy.",
            )
        return
    free = [d for d in _DENSITIES if d > figures.density and steps[d] <= 1.01 * figures.step_s]
    if free:
        yield Advice("hint", f"density {max(free):g} would cost no time here (predicted), and lose less.")


def _regrouping(figures: JobFigures, plan: Plan, costs: GroupCosts) -> Iterator[Advice]:
    best = plan_optimal(costs)
    faster = figures.step_s / step_with(figures, best, costs)
    if best != plan and faster >= 1.02:
        yield Advice(
            "hint",
            f"{len(best.groups)} buffers in place of {len(plan.groups)} would make steps {faster:.2f} times faster "
            '(predicted): use fusion="adaptive".',
        )


def _missing(figures: JobFigures) -> Iterator[Advice]:
    if figures.missing_rate:
        yield Advice(
            "warning",
            f"{figures.missing_rate:.1%} of the gradient tensors send nothing in a step: they are selected after "
            'fusion. scope="tensor" selects from every tensor.',
        )


def _straggler(figures: JobFigures) -> Iterator[Advice]:
    rank, behind = figures.slowest_rank or (0, 0.0)
    if behind > 0.05 * figures.step_s:
        yield Advice(
            "hint",
            f"All workers wait for rank {rank}, whose own work takes {behind * 1e3:.1f} ms longer than that of the "
            "median worker: look at its data loading and its machine.",
        )
