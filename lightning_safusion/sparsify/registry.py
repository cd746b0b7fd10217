"""Sparsifiers by name."""

from __future__ import annotations

from lightning_safusion.registry import Registry
from lightning_safusion.sparsify.adtopk import ADTopk
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.basic import NoCompression, RandomK, Threshold, TopK
from lightning_safusion.sparsify.dgc import DGC
from lightning_safusion.sparsify.gaussiank import GaussianK
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.sidco import SIDCo

#: By the names that ``compressor`` takes.
SPARSIFIERS: dict[str, type[Sparsifier]] = {
    kind.name: kind
    for kind in (TopK, RandomK, Threshold, DGC, GaussianK, RedSync, SIDCo, ADTopk, OkTopk, NoCompression)
}
_REGISTRY: Registry[Sparsifier] = Registry("compressor", Sparsifier, SPARSIFIERS, "compressors", "a Sparsifier")


def available_sparsifiers() -> list[str]:
    """Names that :func:`resolve_sparsifier` knows: the built-in ones, then those of installed packages."""
    return _REGISTRY.names()


def resolve_sparsifier(spec: str | Sparsifier) -> Sparsifier:
    """Builds a sparsifier with its default arguments from its name; a sparsifier is returned as it is.

    Errors are those of :meth:`Registry.resolve`.
    """
    return _REGISTRY.resolve(spec)
