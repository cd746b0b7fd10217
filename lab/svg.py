"""Charts as SVG: letters stay text, and the chart brings its own background, light or dark as the reader's screen is.

A page cannot tell a picture which of its own colours are shown, so ink and background change together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_safusion.lookup import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours of what is compared; they can be seen on both backgrounds.
DEFAULT, BF16, DDP, FLOOR = "#3a7bd5", "#d2801e", "#848d97", "#a8b1bb"
#: The colour of letters, as matplotlib draws it.
INK = "#1f2328"
# Colours of a light screen, which matplotlib draws, and of a dark one.
_INK, _CARD, _LINE = (INK, "#e6edf3"), ("#fefefe", "#161b22"), ("#d0d7dd", "#3d444d")
_NAMED = {"ink": _INK, "card": _CARD, "line": _LINE}
_LOOKS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "safusion",  # the same names in every run
    "font.size": 11,
    "figure.labelsize": 11,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.2,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK[0]),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), _CARD[0]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _LINE[0]),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}


@contextmanager
def chart(path: Path, size: tuple[float, float], title: str, description: str) -> Iterator[Figure]:
    """A figure, written when the block ends.

    Args:
        path: File to write.
        size: Width and height in inches; at 5 a phone shows letters nearly as large as those of the page.
        title: What it is, for those who do not see it.
        description: What it shows.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    need("matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_LOOKS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    path.write_text(_themed(drawn.getvalue(), title, description), encoding="utf-8")


def _themed(svg: str, title: str, description: str) -> str:
    for name, (light, _) in _NAMED.items():
        svg = svg.replace(light, f"var(--{name})")
    light, dark = ("; ".join(f"--{name}: {pair[at]}" for name, pair in _NAMED.items()) for at in (0, 1))
    style = f"<style>:root {{{light}}} @media (prefers-color-scheme: dark) {{:root {{{dark}}}}}</style>"
    told = f"<title>{escape(title)}</title>\n <desc>{escape(description)}</desc>"
    start = svg.index("<svg")
    head = svg.index(">", start) + 1
    lines = f'{svg[start : head - 1]} role="img">\n {told}\n {style}{svg[head:]}'.splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
