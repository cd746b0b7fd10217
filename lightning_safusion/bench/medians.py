"""What blocks of steps amount to: one row of figures for each system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from lightning_safusion.bench.workers import FLOOR, Block


@dataclass(frozen=True)
class SystemFigures:
    """One system under the conditions of one table; times in seconds.

    Args:
        system: Its name.
        step_s: Median step.
        low_s: Lower quartile.
        high_s: Upper quartile.
        over_floor: Median step over that of the floor.
        over_ddp: Median step over DDP's.
        exposed_s: What the step takes longer than the floor, less selection and decoding: waiting for the exchange, and
            whatever it takes away from the computation.
        awaited_s: Seconds for which the backward pass waited for exchanges, by the engine's own clock; None for DDP.
        select_s: Compensation, selection and packing; None for DDP.
        decode_s: Decoding; None for DDP.
        bytes_sent: Bytes that a worker hands to its collectives in a step; None for DDP.
        wire_bytes: Bytes that its device has sent per step, headers and acknowledgements included; None on the
            loopback.
        density: Share of the elements that was sent; None for DDP.
        buffers: Collectives of a step; None for DDP.
        peak_bytes: Largest resident set of a worker, torch itself and this package included.
        plain_ddp: Why DDP did the exchange; None if the engine did.
    """

    system: str
    step_s: float
    low_s: float
    high_s: float
    over_floor: float
    over_ddp: float
    exposed_s: float
    awaited_s: float | None
    select_s: float | None
    decode_s: float | None
    bytes_sent: float | None
    wire_bytes: float | None
    density: float | None
    buffers: float | None
    peak_bytes: float
    plain_ddp: str | None


def summarize(blocks: Mapping[str, Sequence[Sequence[Block]]]) -> list[SystemFigures]:
    """Figures of all systems of one run, from the blocks of each round by rank; the floor and DDP are among them.

    A step of a block takes the mean over its workers; the first one of a block is left out, for it meets the caches and
    the network as another system left them.
    """
    steps = {system: _steps(rounds) for system, rounds in blocks.items()}
    floor, ddp = median(steps[FLOOR]), median(steps["ddp"])
    return [_row(system, steps[system], rounds, floor, ddp) for system, rounds in blocks.items()]


def _steps(rounds: Sequence[Sequence[Block]]) -> list[float]:
    return [fmean(step) for ranks in rounds for step in list(zip(*(b.steps for b in ranks), strict=True))[1:]]


def _row(
    system: str, steps: Sequence[float], rounds: Sequence[Sequence[Block]], floor: float, ddp: float
) -> SystemFigures:
    flat = [block for ranks in rounds for block in ranks]
    step, (low, high) = median(steps), np.quantile(steps, (0.25, 0.75)).tolist()
    reports = [block.figures for block in flat if block.figures.get("plan")]
    engine = {
        key: median(report[key] for report in reports) if reports else None
        for key in ("exposed_s", "select_s", "decode_s", "bytes_sent", "achieved_density")
    }
    own = (engine["select_s"] or 0.0) + (engine["decode_s"] or 0.0)
    wire = [block.wire_bytes for block in flat if block.wire_bytes is not None]
    return SystemFigures(
        system,
        step,
        low,
        high,
        step / floor,
        step / ddp,
        max(0.0, step - floor - own),
        engine["exposed_s"],
        engine["select_s"],
        engine["decode_s"],
        engine["bytes_sent"],
        median(wire) if wire else None,
        engine["achieved_density"],
        median(len(report["plan"]) for report in reports) if reports else None,
        max(block.peak_bytes for block in flat),
        flat[-1].figures.get("plain_ddp"),
    )
