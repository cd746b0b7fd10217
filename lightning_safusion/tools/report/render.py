"""How pages are made of templates: files without scripts and without requests, for light and dark screens."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from io import StringIO
from math import isnan
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeGuard

from lightning_safusion.__about__ import __version__
from lightning_safusion.literal import plural
from lightning_safusion.lookup import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

# Names may have control characters, which matplotlib writes as they are and no file of XML 1.0 may hold.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    """Seconds as text; a dash if they are not known."""
    return f"{seconds * 1e3:,.{digits}f} ms" if is_known(seconds) else "–"


def share(value: float | None, digits: int = 1, sign: str = "") -> str:
    """A share in percent, with its sign if ``sign`` is ``"+"``; a dash if it is not known."""
    return f"{value:{sign}.{digits}%}" if is_known(value) else "–"


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is such a number."""
    return value is not None and not isnan(value)


def picture(draw: Callable[..., Figure | SubFigure], *args: Any) -> str:
    """A drawing as the address of an image that holds it."""
    from matplotlib import rc_context

    written = StringIO()
    # text stays text, and a name is no formula
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "safusion", "text.parse_math": False}):
        draw(*args).figure.savefig(written, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + b64encode(_NO_XML.sub("\ufffd", written.getvalue()).encode()).decode()


def render(template: str, **values: Any) -> str:
    """A page as HTML, of a file in ``templates`` and the values that it shows.

    Raises:
        ModuleNotFoundError: If Jinja2 or matplotlib is missing; names the extra that brings them.
    """
    need("jinja2", "matplotlib", what="a report")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lightning_safusion.tools.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (milliseconds, share, plural, quote)}
    environment.tests["known"] = is_known
    return environment.get_template(template).render(**values, picture=picture, version=__version__)
