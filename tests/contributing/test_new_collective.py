"""A new collective is a class and a row of the catalogue: the recipe of docs/contributing.md, in a job of three."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.catalogue import COLLECTIVES, Collective, Communicators, SparseBuffer
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import Ability
from tests.cluster import Cluster, settings
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


class Forgets(SparseAllGather):
    """What :meth:`start` has to wait for."""

    def start(self) -> Any:
        super().start()


def forgets(buffer: SparseBuffer, over: Communicators) -> Forgets:
    return Forgets(buffer.spec, over.main, buffer.device, buffer.codec)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda buffer, over: None, "collective 'odd' has built None, which is no Exchange"),
        (forgets, r"Forgets.start must return what its transport returns, not None"),
    ],
    ids=["nothing", "no work"],
)
def test_a_mistake_is_named(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any], said: str) -> None:
    monkeypatch.setitem(COLLECTIVES, "odd", Collective(SparseAllGather, build))
    cluster = Cluster(1, lambda: settings(collective="odd"))
    with pytest.raises((TypeError, RuntimeError), match=said):
        cluster.step(cluster.random_grads(0))
    cluster.close()
