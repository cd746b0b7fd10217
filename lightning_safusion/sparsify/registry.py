"""Sparsifiers by name: the built-in ones, and those of installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.base import Sparsifier

#: Entry-point group under which a package offers sparsifiers of its own: ``name = "package.module:Class"``.
ENTRY_POINT_GROUP = "lightning_safusion.compressors"

_BUILTIN = {
    "topk": "basic:TopK",
    "randomk": "basic:RandomK",
    "threshold": "basic:Threshold",
    "dgc": "dgc:DGC",
    "gaussiank": "gaussiank:GaussianK",
    "redsync": "redsync:RedSync",
    "sidco": "sidco:SIDCo",
    "adtopk": "adtopk:ADTopk",
    "oktopk": "oktopk:OkTopk",
    "none": "basic:NoCompression",
}


def available_sparsifiers() -> list[str]:
    """Names that :func:`resolve_sparsifier` knows: the built-in ones, then those of installed packages."""
    return [*_BUILTIN, *sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} - set(_BUILTIN))]


def resolve_sparsifier(spec: str | Sparsifier) -> Sparsifier:
    """Builds a sparsifier with its default arguments from its name; a sparsifier is returned as it is.

    Args:
        spec: A name of :func:`available_sparsifiers`, or a sparsifier.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If ``spec`` is neither, or an installed package offers something that is not a sparsifier.
    """
    if isinstance(spec, Sparsifier):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"compressor must be a name or a Sparsifier, got {spec!r} of type {type(spec).__name__}")
    kind = _entry(spec).load()
    sparsifier = kind()
    if not isinstance(sparsifier, Sparsifier):
        raise TypeError(f"compressor {spec!r} of {kind.__module__} makes {sparsifier!r}, which is not a Sparsifier")
    return sparsifier


def _entry(name: str) -> EntryPoint:
    if name in _BUILTIN:
        return EntryPoint(name, f"lightning_safusion.sparsify.{_BUILTIN[name]}", ENTRY_POINT_GROUP)
    check_name("compressor", name, available_sparsifiers(), "pass a Sparsifier")
    return next(entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == name)
