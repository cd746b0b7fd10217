"""A new compressor is a class and a row of the registry: the recipe of docs/contributing.md, in a training."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from lightning_safusion import SAFusionStrategy, Segments, Selection, Sparsifier, as_selection
from lightning_safusion.sparsify.registry import SPARSIFIERS
from lightning_safusion.testing import check_sparsifier
from tests.models import TinyClassifier, equal, fit_both


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
    monkeypatch.setitem(SPARSIFIERS, Cyclic.name, Cyclic)


def test_it_keeps_the_contract() -> None:
    check_sparsifier(Cyclic)


def test_it_trains() -> None:
    strategy = SAFusionStrategy("cyclic", system="behind", density=0.25)
    (first, losses, report), (second, _, _) = fit_both(strategy, TinyClassifier(lr=0.03), max_epochs=2)
    assert equal(first, second)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert report["plain_ddp"] is None
    assert report["achieved_density"] == pytest.approx(0.25, rel=0.1)
