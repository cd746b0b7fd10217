"""An optimizer state that cannot be read: an error on all ranks, and nobody waits for a message that never comes."""

from __future__ import annotations

import pytest
import torch

from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from tests.cluster import Cluster, settings, specs


def unreadable(index: int) -> Moment | None:
    raise TypeError(f"no second moment of tensor {index}")


@pytest.mark.parametrize("collective", ["allgather", "sharded", "hierarchical", "hierarchical-sharded"])
def test_units_that_cannot_be_read_stop_all_ranks(collective: str) -> None:
    cluster = Cluster(2, lambda: settings(collective=collective, density=0.05), specs())
    cluster.step(cluster.random_grads(0))
    cluster.engines[0].space.compare_in(UpdateUnits(unreadable, torch.device("cpu")))
    grads = cluster.random_grads(1)

    def window(rank: int) -> str:
        try:
            for index in cluster.order:
                cluster.engines[rank].push(index, grads[rank][index])
            cluster.engines[rank].drain()
        except (RuntimeError, TypeError) as error:
            return str(error)
        return ""

    said = cluster.each(window)
    assert all(said)
    assert not any("did not launch" in each for each in said)  # nobody waited in vain
    cluster.close()
