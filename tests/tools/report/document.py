"""A strict reader of pages, for tests."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img"}


class Document(HTMLParser):
    """A page, refused if its elements are not closed in order.

    Args:
        page: HTML.

    Attributes:
        tags: Every element with its attributes, in order.
        texts: Text by the name of the element that it is in.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data))

    def values(self, attribute: str) -> list[str]:
        """All values of an attribute."""
        return [value for _, attributes in self.tags if (value := attributes.get(attribute)) is not None]

    def elements(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of this name."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        """Everything that can be read, without the style sheet; lines are broken by the reader."""
        return " ".join(" ".join(data for tag, data in self.texts if tag != "style").split())
