"""A new compressor is a class and a row of the registry: the recipe of docs/contributing.md, in a training."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion import SAFusionStrategy, Segments, Selection, Sparsifier
from lightning_safusion.sparsify import registry, resolve_sparsifier
from lightning_safusion.sparsify.base import as_selection, check_selection
from tests.models import TinyClassifier, equal, fit_both
from tests.sparsify.oracle import cut


class Cyclic(Sparsifier):
    """Sends the next part of every tensor in every step, whatever its values are."""

    name = "cyclic"
    estimates = False

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        places = [np.zeros(0, np.int64)]
        for start, size, quota in zip(segments.edges, segments.sizes, segments.quotas, strict=False):
            places.append(start + np.sort((step * quota + np.arange(quota)) % max(size, 1)))
        return as_selection(np.concatenate(places), x)


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row, as a package of somebody else has it in its pyproject.toml."""
    row = EntryPoint("cyclic", f"{__name__}:Cyclic", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [row])


def test_it_keeps_the_contract() -> None:
    segments = cut([10, 0, 7, 3], [3, 0, 7, 0])
    x = torch.arange(20.0)
    compressor = resolve_sparsifier("cyclic")
    for step in range(5):
        selection = compressor.select(x, segments, step)
        check_selection(selection, segments, "cyclic")
        assert selection.indices[:3].tolist() == sorted((3 * step + place) % 10 for place in range(3))


def test_it_trains() -> None:
    strategy = SAFusionStrategy("cyclic", system="behind", density=0.25)
    (first, losses, report), (second, _, _) = fit_both(strategy, TinyClassifier(lr=0.03), max_epochs=2)
    assert equal(first, second)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert report["plain_ddp"] is None
    assert report["achieved_density"] == pytest.approx(0.25, rel=0.1)
