"""One line on what travels how, whenever that changes."""

from __future__ import annotations

from collections.abc import Callable

from lightning_safusion.fusion.plans.plan import Plan


class Announcer:
    """Says which collectives a plan uses, once for each combination: nobody should take a dense run for a sparse one.

    Args:
        announce: Told the line; None says nothing.
    """

    def __init__(self, announce: Callable[[str], None] | None) -> None:
        self._announce = announce
        self._announced: tuple[bool, bool] | None = None

    def tell(self, plan: Plan, by_choice: bool) -> None:
        """Takes in the plan of the next windows.

        Args:
            plan: The plan.
            by_choice: What is dense in it could have been sparse.
        """
        dense = sum(group.collective == "allreduce" for group in plan.groups)
        sparse = len(plan.groups) - dense
        kinds = (dense > 0, sparse > 0)
        if self._announce is None or kinds == self._announced:
            return
        self._announced = kinds
        tensors = plan.num_tensors
        text = f"{tensors} tensors travel in {len(plan.groups)} buffers, {sparse} sparse and {dense} dense"
        if dense and by_choice:
            text += "; dense ones are predicted to be faster here (collective='allgather' sends every buffer sparse)"
        self._announce(text)
