"""Sparsifiers by name: the built-in ones, and those of installed packages."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from lightning_safusion.lookup import suggestion
from lightning_safusion.sparsify.base import Sparsifier

#: Entry-point group under which a package offers sparsifiers of its own: ``name = "package.module:Class"``.
ENTRY_POINT_GROUP = "lightning_safusion.compressors"

_BUILTIN = {
    "topk": "topk:TopK",
    "randomk": "randomk:RandomK",
    "threshold": "threshold:Threshold",
    "dgc": "dgc:DGC",
    "gaussiank": "gaussiank:GaussianK",
    "redsync": "redsync:RedSync",
    "sidco": "sidco:SIDCo",
    "adtopk": "adtopk:ADTopk",
    "oktopk": "oktopk:OkTopk",
    "none": "identity:NoCompression",
}


def available_sparsifiers() -> list[str]:
    """Names that :func:`resolve_sparsifier` knows: the built-in ones, then those of installed packages."""
    return [*_BUILTIN, *sorted(set(_installed()) - set(_BUILTIN))]


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
    if spec in _BUILTIN:
        module, _, attribute = _BUILTIN[spec].partition(":")
        kind = getattr(import_module(f"lightning_safusion.sparsify.{module}"), attribute)
    else:
        kind = _load(spec)
    sparsifier = kind()
    if not isinstance(sparsifier, Sparsifier):
        raise TypeError(f"compressor {spec!r} of {kind.__module__} makes {sparsifier!r}, which is not a Sparsifier")
    return sparsifier


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str) -> type:
    installed = _installed()
    if name not in installed:
        names = available_sparsifiers()
        hint = suggestion(name, names)
        raise ValueError(f"unknown compressor {name!r}.{hint} Choose one of {', '.join(names)}, or pass a Sparsifier")
    loaded: type = installed[name].load()
    return loaded
