from __future__ import annotations

from typing import Any

import pytest

from lightning_safusion.sparsify import TopK, resolve_sparsifier

BUILTIN = ["topk", "randomk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "adtopk", "oktopk", "none"]


def test_every_builtin_name_gives_the_sparsifier_of_that_name() -> None:
    assert [resolve_sparsifier(name).name for name in BUILTIN] == BUILTIN


def test_a_sparsifier_is_returned_as_it_is() -> None:
    sparsifier = TopK()
    assert resolve_sparsifier(sparsifier) is sparsifier


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown compressor 'top-k'\. Did you mean 'topk'\?.*sidco"):
        resolve_sparsifier("top-k")


def test_other_types_are_refused() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="got 5 of type int"):
        resolve_sparsifier(wrong)
