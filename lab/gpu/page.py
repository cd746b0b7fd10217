"""The page of a run: every figure beside its budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.gpu.figures import Figure, plain
from lab.gpu.stages import STAGES
from lab.markdown import markdown

if TYPE_CHECKING:
    from lab.gpu.command import Outcome

_REHEARSAL = (
    "**A rehearsal on the CPU: nothing here was measured on a device.** Kernels ran in Triton's interpreter, sizes are "
    "small, and times are those of the CPU: they say only that every stage finds its figures."
)
_COLUMNS = ("figure", "value", "budget", "inside", "")


def page(outcomes: Sequence[Outcome], rehearse: bool, costs: bool) -> str:
    """Markdown.

    Args:
        outcomes: Of the stages that have run so far.
        rehearse: On the CPU.
        costs: There is a file of the device's costs.
    """
    told = {figure.name: figure.value for outcome in outcomes for figure in outcome.figures if figure.kind == "noted"}
    parts = ["# What the GPU shows", _REHEARSAL if rehearse else f"Measured on {told.get('device', 'a CUDA device')}."]
    if costs:
        about = "of the CPU, which no plan should use" if rehearse else "of this device"
        parts.append(f"`device-costs.json` beside this page has the costs {about}.")
    rows = [(o.name, STAGES[o.name].shows, o.state, f"{o.seconds:.0f} s", _count(o, rehearse)) for o in outcomes]
    parts.append(markdown(("stage", "shows", "state", "took", "outside"), rows, 3))
    for outcome in outcomes:
        parts.append(f"## {outcome.name}")
        if outcome.figures:
            parts.append(markdown(_COLUMNS, [_cells(figure, rehearse) for figure in outcome.figures]))
        if outcome.why:
            parts.append(f"{outcome.state}:\n\n```\n{outcome.why}\n```")
    return "\n\n".join(parts) + "\n"


def _count(outcome: Outcome, rehearse: bool) -> str:
    verdicts = [_verdict(figure, rehearse) for figure in outcome.figures]
    return f"{verdicts.count('**no**')} of {len(verdicts)}"


def _verdict(figure: Figure, rehearse: bool) -> str:
    """Whether it is inside its budget; a clock says nothing in a rehearsal."""
    if figure.holds is None:
        return ""
    if rehearse and figure.kind == "measured":
        return "not judged"
    return plain(figure.holds)


def _cells(figure: Figure, rehearse: bool) -> tuple[str, ...]:
    value = " ".join(filter(None, [plain(figure.value), figure.unit])).replace("|", "\\|").replace("\n", "<br>")
    about = figure.note.replace("|", "\\|").replace("\n", "<br>")
    return figure.name, value, figure.budget, _verdict(figure, rehearse), about
