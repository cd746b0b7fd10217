"""Batches by which workers of different speed end their steps together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_safusion.fusion.slowest import LEAST_S, LEAST_SHARE, median_of_others

_SHOWN = 8


def slow_rank(seconds: Sequence[float]) -> int | None:
    """The worker whose own step takes the longest, if it is longer than the others' by more than 5 % and 1 ms.
    ``seconds``: by rank, of work that waits for nobody."""
    if len(seconds) < 2:
        return None
    others = median_of_others(np.array(seconds))
    slow = int(np.argmax(seconds))
    return slow if seconds[slow] - others[slow] > max(LEAST_SHARE * others[slow], LEAST_S) else None


def better_batches(seconds: Sequence[float], samples: Sequence[int | None] = ()) -> str:
    """Batches in proportion to the speed of workers, of the same sum, in words; empty without times. By rank: the
    seconds that workers take for their batches, and the samples of these, if they are known."""
    if not seconds or not all(each > 0 for each in seconds):
        return ""
    sizes = [each for each in samples if each]
    known = len(sizes) == len(seconds)
    before = np.array(sizes if known else [1.0] * len(seconds))
    speeds = before / np.array(seconds)
    wanted = before.sum() * speeds / speeds.sum()
    odd = sorted(np.argsort(-np.abs(wanted / before - 1), kind="stable")[:_SHOWN].tolist())
    if known:
        rounded = _rounded(wanted)
        shown = ", ".join(f"{rounded[rank]} on rank {rank} ({before[rank]} now)" for rank in odd)
        return f"batches of {shown}{_rest(odd, seconds, 'as they are')}"
    shown = ", ".join(f"{wanted[rank]:.2f} on rank {rank}" for rank in odd)
    return f"batches times {shown}{_rest(odd, seconds, 'about 1')}"


def _rounded(wanted: np.ndarray) -> list[int]:
    """Whole numbers of the same sum, at least 1: the largest remainders are rounded up."""
    whole = np.maximum(np.floor(wanted).astype(int), 1)
    left = int(round(float(wanted.sum()))) - int(whole.sum())
    for rank in np.argsort(whole - wanted, kind="stable")[: max(0, left)]:
        whole[rank] += 1
    return [int(each) for each in whole]


def _rest(odd: Sequence[int], seconds: Sequence[float], how: str) -> str:
    return f", and {how} on the others" if len(odd) < len(seconds) else ""
