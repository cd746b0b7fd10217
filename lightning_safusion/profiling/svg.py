"""Pictures of matplotlib as SVG inside a page, with a text for the mouse on their bars and points.

Matplotlib is optional: it is imported when something is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, ParamSpec
from weakref import WeakKeyDictionary
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure, SubFigure

_P = ParamSpec("_P")

_INK = "#0a0b0c"  # replaced by the text colour of the page
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
_OPTIONS: dict[Any, Any] = {
    **dict.fromkeys(_INKED, _INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "safusion",
    "text.parse_math": False,  # a name is no formula
}

_TIPS: WeakKeyDictionary[Artist, Sequence[str]] = WeakKeyDictionary()


def explain(artist: Artist, texts: Sequence[str]) -> None:
    """Says what the mouse shows on the parts of an artist, where a page has the picture.

    Args:
        artist: A collection, or a patch.
        texts: One for each part of a collection, in order; one for a patch.
    """
    _TIPS[artist] = texts


# Names may have control characters, which matplotlib writes as they are and no file of XML 1.0 may hold.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def inline(prefix: str, draw: Callable[_P, Figure | SubFigure], *args: _P.args, **kwargs: _P.kwargs) -> str:
    """A picture as an SVG element, whose lines and letters have the colour of the text around it.

    Args:
        prefix: Of its ids, which must differ from those of the page's other pictures.
        draw: Draws the picture; what it has told :func:`explain` becomes ``<title>`` elements.
        args: For ``draw``.
        kwargs: For ``draw``.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    from matplotlib import rc_context

    written = StringIO()
    with rc_context(_OPTIONS):
        figure = draw(*args, **kwargs).figure
        _link(figure)
        figure.savefig(written, format="svg", transparent=True)
    root = ElementTree.fromstring(_NO_XML.sub("\ufffd", written.getvalue()))  # noqa: S314 - made here
    for element in list(root.iter()):
        _settle(element, prefix)
    return ElementTree.tostring(root, encoding="unicode")


def _link(figure: Artist) -> None:
    """Writes the texts as addresses, the one thing that matplotlib writes around each single part of a collection."""
    from matplotlib.collections import Collection

    for artist in figure.findobj(_TIPS.__contains__):
        if isinstance(artist, Collection):
            artist.set_urls(_TIPS[artist])
        else:
            artist.set_url(_TIPS[artist][0])


def _settle(element: ElementTree.Element, prefix: str) -> None:
    """Makes an element of a file one of a page: no namespaces, metadata and styles for all; ids of its own; titles."""
    for child in list(element):
        if _plain(child.tag) in ("metadata", "style"):
            element.remove(child)
    element.tag = _plain(element.tag)
    for name, value in list(element.items()):
        del element.attrib[name]
        name = _plain(name)
        if name == "id":
            value = f"{prefix}-{value}"
        elif name == "href" and value.startswith("#"):
            value = f"#{prefix}-{value[1:]}"
        elif name != "href":
            value = value.replace("url(#", f"url(#{prefix}-").replace(_INK, "currentColor")
        element.set(name, value)
    if element.tag == "a":
        title = ElementTree.Element("title")
        title.text = element.attrib["href"]
        element.tag = "g"
        element.attrib.clear()
        element.set("pointer-events", "all")  # what has no colour as well
        element.insert(0, title)


def _plain(name: str) -> str:
    return name.rpartition("}")[2]
