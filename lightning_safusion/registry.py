"""What names mean: the package's own parts, and those of installed packages, imported when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from lightning_safusion.lookup import check_name

_T = TypeVar("_T")


class Registry(Generic[_T]):
    """Parts of one kind by name. Installed packages add some by entry points, ``name = "package.module:Part"``.

    Args:
        kind: What it names, for messages ("compressor").
        base: Class of all, or a union.
        own: Those of this package: parts, or what makes one without arguments. No other package can replace them.
        group: Of the entry points, after ``lightning_safusion.``; they are what ``own`` has.
        instead: What else may be given in place of a name ("a Sparsifier"); empty: nothing.
    """

    def __init__(
        self, kind: str, base: Any, own: Mapping[str, _T | Callable[[], _T]], group: str, instead: str = ""
    ) -> None:
        self.kind, self.base, self.own, self.instead = kind, base, own, instead
        self.group = f"lightning_safusion.{group}"
        self._entries: dict[str, EntryPoint] = {}  # that were asked for: to find one takes milliseconds

    def offered(self) -> dict[str, EntryPoint]:
        """What installed packages add, by name; nothing of them is imported."""
        entries = sorted(entry_points(group=self.group), key=lambda entry: entry.name)
        return {entry.name: entry for entry in entries if entry.name not in self.own}

    def names(self) -> list[str]:
        """All names: the package's own, then those of installed packages."""
        return [*self.own, *self.offered()]

    def resolve(self, spec: str | _T) -> _T:
        """The part of a name, made anew if its entry makes one; a part is returned as it is.

        Raises:
            ValueError: If the name is unknown, or two packages have it.
            TypeError: If ``spec`` is neither, or a package offers something else.
            RuntimeError: If the part of another package cannot be imported or made; names package and entry.
        """
        if self.instead and isinstance(spec, self.base):
            return cast(_T, spec)
        if self.instead and not isinstance(spec, str):
            of = f"{spec!r} of type {type(spec).__name__}"
            raise TypeError(f"{self.kind} must be a name or {self.instead}, got {of}")
        if isinstance(spec, str) and spec in self.own:
            return self._made(self.own[spec])
        name = str(spec)
        if name not in self._entries:
            check_name(self.kind, spec, self.names(), self.instead and f"pass {self.instead}")
            entries = [entry for entry in entry_points(group=self.group) if entry.name == name]
            if len(entries) > 1:
                origin = " and ".join(map(origin_of, entries))
                raise ValueError(f"{self.kind} {name!r} is offered twice, by {origin}: uninstall one of these packages")
            self._entries[name] = entries[0]
        return self._of_package(self._entries[name])

    def _of_package(self, entry: EntryPoint) -> _T:
        which = f"{self.kind} {entry.name!r} of {origin_of(entry)}"
        try:
            part = self._made(entry.load())
        except (Exception, SystemExit) as error:  # whatever another package raises
            raise RuntimeError(
                f"{which} cannot be loaded: {type(error).__name__}: {error}. Mend or uninstall that package, or choose "
                "another name."
            ) from error
        if not isinstance(part, self.base):
            raise TypeError(f"{which} is {part!r}, which is no {getattr(self.base, '__name__', self.base)}")
        return part

    def _made(self, found: Any) -> _T:
        return cast(_T, found if isinstance(found, self.base) or not callable(found) else found())


def origin_of(entry: EntryPoint) -> str:
    """``"PACKAGE VERSION (MODULE:NAME)"``; nothing is imported."""
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    return f"{package} ({entry.value})"
