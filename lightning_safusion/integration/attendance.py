"""Whether all ranks have come to a point that an error keeps some from."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch.distributed as dist

# Seconds for the slowest rank: an error that all have, such as Ctrl-C, reaches them within a step.
_PATIENCE = 10.0
_POLL = 0.02
_NUMBERS = count()


def all_attend(step: int | None) -> bool:
    """Whether all ranks of the default process group come here after the same step; the same on all that come.

    Asked of the group's store. A collective would wait for ranks that are lost, and ranks that are still in an exchange
    would take it for a part of that.

    Args:
        step: After which step this rank comes; None in the middle of one: then they do not.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    store: Any = dist.PrefixStore(f"safusion attendance {next(_NUMBERS)}", dist.distributed_c10d._get_default_store())
    ranks = [str(rank) for rank in range(dist.get_world_size())]
    try:
        found = "some"
        if step is not None:
            store.set(str(dist.get_rank()), str(step))
            until = time.monotonic() + _PATIENCE
            while not (come := store.check(ranks)) and not store.check(["found"]) and time.monotonic() < until:
                time.sleep(_POLL)
            if come and len({store.get(rank) for rank in ranks}) == 1:
                found = "all"
        return bool(store.compare_set("found", "", found) == b"all")  # what the first rank has found counts
    except RuntimeError:  # the store has gone with its rank
        return False
