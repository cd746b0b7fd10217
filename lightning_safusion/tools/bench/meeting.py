"""How the processes of a benchmark agree: by a store that outlives every process group, so that a row may fail."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL = 0.5  # seconds
_PATIENCE = 10.0  # seconds
_log = logging.getLogger("lightning.pytorch.safusion_bench")  # goes where Lightning's lines go


class Meeting:
    """The processes of a benchmark between two turns. Made when the default process group has been; collective.
    ``timeout``: of the groups that are made after a failure, and of the waits for each other."""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._backend, self._timeout = dist.get_backend(), timeout
        # made here: stores of launchers are theirs to close
        address: list[Any] = [None]
        if self.rank == 0:
            self._server = _store(os.environ.get("MASTER_ADDR") or socket.gethostname(), timeout)
            address = [[self._server.host, self._server.port]]
        dist.broadcast_object_list(address, 0, device=device)
        # Calls of one client wait for each other: a thread that listens, and groups that are made, have their own.
        host, port = address[0]
        self._store, self._heard, self._groups = (
            dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False) for _ in range(3)
        )
        self._number = 0

    def hold(self, mine: Mapping[str, Any], judge: Callable[[list[Any]], Any]) -> Any:
        """Collects what each process has to say, as JSON has it; all get what the first one makes of it by ``judge``,
        which is called with what all have said, by rank. Collective."""
        self._number += 1
        place = f"meeting {self._number}"
        self._store.set(f"{place}/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            everyone = [json.loads(self._store.get(f"{place}/{rank}")) for rank in range(self.workers)]
            self._store.set(f"{place}/result", json.dumps(judge(everyone)))
            for rank in range(self.workers):
                self._store.delete_key(f"{place}/{rank}")
        return json.loads(self._store.get(f"{place}/result"))

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """Does something collective that may fail on this process alone: the others then fail too, and do not wait.
        Returns its result, None if it failed; and why the first process that failed did, in 300 letters at most."""
        failed, ended = f"failure {self._number}", threading.Event()
        listener = threading.Thread(target=self._listen, args=(failed, ended), daemon=True)
        if self._backend == "nccl":  # its peers do not notice that one has left
            listener.start()
        try:
            result, reason = action(), None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            _log.exception("A turn has failed.")
            error.__traceback__ = None  # its frames hold the model, and works of the group
        ended.set()
        if listener.ident is not None:
            listener.join()  # it may be ending the groups
        if reason is None:
            self._store.set(f"{failed}/{self.rank}", "1")
            return result, None
        # whoever fails later fails because the first one has left
        reason = self._store.compare_set(failed, "", reason).decode()
        self._store.set(f"{failed}/{self.rank}", "1")
        if self._backend == "nccl":
            self._await_others(failed)
        gc.collect()
        _abandon_groups()
        return None, reason

    def _listen(self, failed: str, ended: threading.Event) -> None:
        while not ended.wait(_POLL):
            if self._heard.check([failed]):
                _abandon_groups()
                self._heard.set(f"{failed}/{self.rank}", "1")
                return

    def _await_others(self, failed: str) -> None:
        """NCCL's watchdog ends a process that is left in a collective."""
        others = [f"{failed}/{rank}" for rank in range(self.workers) if rank != self.rank]
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(_POLL / 5)

    def regroup(self) -> None:
        """Makes the default process group anew, after a failure on any process. Collective."""
        gc.collect()
        _abandon_groups()
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"group {self._number}", self._groups),
            rank=self.rank,
            world_size=self.workers,
            timeout=self._timeout,
            device_id=self.device if self.device.type == "cuda" else None,  # as Lightning's
        )

    def any(self, mine: bool) -> bool:
        """Whether it is true of some process; by the process group, so that all go on together. Collective."""
        flag = torch.full((1,), float(mine), dtype=torch.float32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def close(self) -> None:
        """All have come to the end: the store may go."""
        self.hold({}, lambda everyone: None)
        if self.rank == 0:  # the others read the result from it
            self._number += 1
            for rank in range(1, self.workers):
                self._store.get(f"leave {rank}")
        else:
            self._store.set(f"leave {self.rank}", "1")


def _store(address: str, timeout: timedelta) -> dist.TCPStore:
    """A store that listens; on this machine alone, if the address is of no use elsewhere."""
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if address != "localhost" and not address.startswith("127."):
        return dist.TCPStore(address, 0, **options)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, master_listen_fd=listening.detach(), **options)


def _abandon_groups() -> None:
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl" and hasattr(dist.distributed_c10d, "_abort_process_group"):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def wait_for(device: torch.device) -> None:
    """Waits until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu" and hasattr(torch, "accelerator"):
        torch.accelerator.synchronize(device)
