"""Workers that are started anew agree on a name of their own, whatever dead ones have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_safusion.comm.transport.rounds import agreed

_TIMEOUT = timedelta(seconds=20)


@settings(max_examples=20)
@given(workers=st.integers(1, 4), dead=st.lists(st.sets(st.integers(0, 3)), max_size=3))
def test_the_living_agree_beside_what_the_dead_have_written(workers: int, dead: list[set[int]]) -> None:
    """Of earlier starts some ranks came so far as to sign, or all of them had met."""
    store = dist.HashStore()
    store.set_timeout(_TIMEOUT)
    names = []
    for number, signed in enumerate([*dead, set()]):
        for rank in signed:
            store.set(f"rank {rank}", f"dead {number}")
        with ThreadPoolExecutor(workers) as pool:
            met = set(pool.map(lambda rank: agreed(store, rank, workers, _TIMEOUT), range(workers)))
        assert len(met) == 1
        names += met
    assert len(set(names)) == len(names)


def test_rank_0_waits_no_longer_than_it_may() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 workers have not come within"):
        agreed(dist.HashStore(), 0, 2, timedelta(0))
