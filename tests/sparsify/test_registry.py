"""Names of compressors and memories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_safusion.sparsify import resolve_memory, resolve_sparsifier
from lightning_safusion.sparsify.memory.residual import MEMORIES
from lightning_safusion.sparsify.registry import SPARSIFIERS


@pytest.mark.parametrize(("resolve", "known"), [(resolve_sparsifier, SPARSIFIERS), (resolve_memory, MEMORIES)])
def test_a_part_is_made_by_its_name(resolve: Callable[[Any], Any], known: Mapping[str, type]) -> None:
    for name, kind in known.items():
        part = resolve(name)
        assert type(part) is kind
        assert resolve(part) is part
    with pytest.raises(TypeError, match="got 5 of type int"):
        resolve(5)
    with pytest.raises(ValueError, match=r"unknown \w+ 'nome'\. Did you mean 'none'\?"):
        resolve("nome")
