"""Workers that torchrun has started anew meet apart from those before them, though its store has outlived those."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

_POLL_S = 0.02


@contextmanager
def apart(timeout: timedelta | None) -> Iterator[None]:
    """While it lasts, ``torch.distributed.init_process_group`` keeps to what workers of this start have written.

    Collective where torchrun shares its store with workers: with a static rendezvous, and with c10d unless
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``. Workers read addresses of the dead there, and fail or hang
    (https://github.com/pytorch/pytorch/issues/135712). Elsewhere nothing happens.

    Args:
        timeout: For all to meet; None: torch's.
    """
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares or not dist.is_available() or dist.is_initialized():
        yield
        return
    timeout = timeout or default_pg_timeout
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], port, world_size, is_master=False, timeout=timeout)
    name = agreed(dist.PrefixStore("safusion start", shared), rank, world_size, timeout)
    own = dist.init_process_group  # Lightning passes no store on to it
    dist.init_process_group = partial(own, store=dist.PrefixStore(name, shared))
    try:
        yield
    finally:
        dist.init_process_group = own


def agreed(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that rank 0 has made up and that all know, collective. What dead workers have written does no harm.

    Rank 0 answers whoever has signed for a rank, dead or not, until so many have heard this very name.

    Raises:
        RuntimeError: If some do not come (torch's ``DistStoreError`` in those that wait for rank 0).
    """
    mine = uuid4().hex
    if rank:
        store.set(f"rank {rank}", mine)
        name: str = store.get(f"answer to {mine}").decode()
        store.add(f"heard {name}", 1)
        return name
    until, answered = time.monotonic() + timeout.total_seconds(), set()
    while (heard := store.add(f"heard {mine}", 0)) < world_size - 1:
        if time.monotonic() > until:
            raise RuntimeError(
                f"{world_size - 1 - heard} of {world_size} workers have not come within {timeout}. Their own output "
                f"says why; SAFusionStrategy(timeout=...) waits longer."
            )
        for key in (f"rank {other}" for other in range(1, world_size)):
            signed = store.get(key).decode() if store.check([key]) else None
            if signed is not None and signed not in answered:
                store.set(f"answer to {signed}", mine)
                answered.add(signed)
        time.sleep(_POLL_S)
    return mine
