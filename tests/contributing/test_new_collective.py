"""A new collective is a class and a row of the catalogue: the recipe of docs/contributing.md, in a job of three."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.catalogue import COLLECTIVES, Collective, Communicators, SparseBuffer
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import Ability
from tests.cluster import settings
from tests.contributing.jobs import exchanged


class Reversed(SparseAllGather):
    """Adds the messages of the ranks from the last to the first."""

    ability = Ability(few_bits=False)

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        return None

    def decode(self, scratch: Tensor) -> Tensor:
        self._messages.reverse()
        mean = super().decode(scratch)
        self._messages.reverse()
        return mean


def build(buffer: SparseBuffer, over: Communicators) -> Reversed:
    return Reversed(buffer.spec, over.main, buffer.device, buffer.codec)


ROW = {"reversed": Collective(Reversed, build)}


def test_it_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTIVES, "reversed", ROW["reversed"])
    means, lost = exchanged("reversed")
    assert lost < 1e-5
    torch.testing.assert_close(means, exchanged("allgather")[0])
    # what it can do is read from its class
    row = COLLECTIVES["reversed"]
    assert row.stream_ordered
    assert row.exchange.ability.conserves
    with pytest.raises(ValueError, match="wire='q4' rounds so much"):
        settings(collective="reversed", wire="q4")
