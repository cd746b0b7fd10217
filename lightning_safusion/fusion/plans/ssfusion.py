"""SSFusion's choices for one buffer: which tensors travel whole, and from which the host selects.

Pure functions of explicit numbers, after SSFusion (ICDE 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class SelectiveChoice(NamedTuple):
    """What SSFusion decides for one buffer.

    Args:
        dense: Whether each tensor travels whole [m].
        density: Density of the others.
    """

    dense: tuple[bool, ...]
    density: float


def choose_selective(
    numels: Sequence[int], density: float, seconds: Callable[[Sequence[bool], float], float]
) -> SelectiveChoice:
    """SSFusion's selective sparsification: the size up to which the tensors of a buffer travel whole.

    Tensors at or below a size are sent whole, as long as they fit into ``density`` times the buffer; the others get
    what is left, so that the buffer as a whole keeps its density. (The release takes the larger of the two densities
    where the smaller one is meant, and so exceeds the budget.) Of all admissible sizes, that with the shortest
    ``seconds`` is taken, the smallest of equals.

    Args:
        numels: Elements of the tensors of the buffer [m].
        density: Density of the buffer.
        seconds: Predicted time of the buffer with ``dense`` tensors and a density for the rest.

    Raises:
        ValueError: If the buffer is empty.
    """
    if not numels:
        raise ValueError("a buffer needs at least one tensor, got none")
    total = sum(numels)
    cap = size_cap(numels, density)
    choices = []
    for size in [0, *sorted({n for n in numels if 0 < n <= cap})]:
        dense = tuple(n <= size for n in numels)
        whole = sum(n for n, is_dense in zip(numels, dense, strict=True) if is_dense)
        left = max(0.0, (density * total - whole) / (total - whole)) if whole < total else 0.0
        choices.append(SelectiveChoice(dense, min(density, left)))
    return min(choices, key=lambda choice: seconds(*choice))


def size_cap(numels: Sequence[int], density: float) -> int:
    """Largest size up to which all tensors of a buffer can travel whole within ``density`` of its elements."""
    budget = max(1.0, density * sum(numels))
    for numel in sorted(numels):
        if numel >= budget:
            return numel - 1
        budget -= numel
    return max(numels)


def choose_offloaded(
    ready: Sequence[float],
    sparse: Sequence[bool],
    gpu_seconds: Sequence[float],
    cpu_seconds: Sequence[float],
) -> list[bool]:
    """SSFusion's offloading within a buffer: the CPU takes a tensor whenever it is free, and never delays the buffer.

    Args:
        ready: Seconds at which each gradient would be ready without any selection, from the start of the buffer [m].
        sparse: Whether it is sparsified at all [m].
        gpu_seconds: Selection on the compute stream [m]; it delays all later gradients.
        cpu_seconds: Selection on the CPU, copies included [m].

    Returns:
        Whether each tensor is selected on the CPU [m].
    """
    offloaded = [False] * len(ready)
    spent = cpu_free = 0.0
    last: int | None = None
    for place, arrives in enumerate(ready):
        if not sparse[place]:
            continue
        if cpu_free > arrives + spent:
            spent += gpu_seconds[place]
        else:
            offloaded[place], last = True, place
            cpu_free = arrives + spent + cpu_seconds[place]
    if last is not None and cpu_free > ready[-1] + spent:
        offloaded[last] = False
    return offloaded
