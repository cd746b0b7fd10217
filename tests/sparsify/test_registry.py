from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from lightning_safusion.sparsify import Sparsifier, TopK, available_sparsifiers, registry, resolve_sparsifier
from lightning_safusion.sparsify.base import span_segments

BUILTIN = ["topk", "randomk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "adtopk", "oktopk", "none"]


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_name_gives_a_working_sparsifier_of_that_name(name: str) -> None:
    sparsifier = resolve_sparsifier(name)
    assert sparsifier.name == name
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    quota = sparsifier.quota(5000, (5000,), 0.01)
    selection = sparsifier.select(x, span_segments(5000, quota), 0)
    assert 1 <= int(selection.count) <= quota
    assert torch.equal(selection.values, x[selection.indices])


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


def test_installed_packages_add_names_but_cannot_replace_builtin_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    group = registry.ENTRY_POINT_GROUP
    offered = [
        EntryPoint("mine", "lightning_safusion.sparsify.basic:TopK", group),
        EntryPoint("topk", "collections:OrderedDict", group),
        EntryPoint("broken", "collections:OrderedDict", group),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: offered)
    assert available_sparsifiers() == [*BUILTIN, "broken", "mine"]
    assert isinstance(resolve_sparsifier("mine"), TopK)
    assert isinstance(resolve_sparsifier("topk"), Sparsifier)
    with pytest.raises(TypeError, match="'broken' of collections"):
        resolve_sparsifier("broken")
