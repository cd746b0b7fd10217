"""How the processes of a benchmark agree: by a store that outlives every process group, so that a row may fail."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL = 0.5  # seconds
_log = logging.getLogger("lightning.pytorch.safusion_bench")  # goes where Lightning's lines go


class Meeting:
    """The processes of a benchmark between two turns. Made when the default process group has been; collective.

    Args:
        device: Of this process.
        timeout: Of the groups that are made after a failure, and of the waits for each other.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._backend, self._timeout = dist.get_backend(), timeout
        # made here: stores of launchers are theirs to close
        address: list[Any] = [None]
        if self.rank == 0:
            store = dist.TCPStore(_own_address(), 0, is_master=True, timeout=timeout, wait_for_workers=False)
            address = [[store.host, store.port]]
        dist.broadcast_object_list(address, 0, device=device)
        if self.rank != 0:
            host, port = address[0]
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store = store
        self._number = 0

    def hold(self, mine: Mapping[str, Any], judge: Callable[[list[Any]], Any]) -> Any:
        """Collects what each process has to say; all get what the first one makes of it. Collective.

        Args:
            mine: Of this process, as JSON has it.
            judge: Called on the first process with what all have said, by rank.

        Returns:
            What ``judge`` has returned, as JSON has it.
        """
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

        Returns:
            Its result, None if it failed; and why this process failed, in a line.
        """
        failed, ended = f"failure {self._number}", threading.Event()
        if self._backend == "nccl":  # its peers do not notice that one has left
            threading.Thread(target=self._listen, args=(failed, ended), daemon=True).start()
        try:
            return action(), None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip()
            _log.exception("A turn has failed.")
            error.__traceback__ = None  # its frames hold the model, and works of the group
        finally:
            ended.set()
        self._store.set(failed, "1")
        gc.collect()
        _abandon_groups()
        return None, reason

    def _listen(self, failed: str, ended: threading.Event) -> None:
        """Ends this process's collectives if another one has failed."""
        while not ended.wait(_POLL):
            if self._store.check([failed]):
                _abandon_groups()
                return

    def regroup(self) -> None:
        """Makes the default process group anew, after a failure on any process. Collective."""
        gc.collect()
        _abandon_groups()
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"group {self._number}", self._store),
            rank=self.rank,
            world_size=self.workers,
            timeout=self._timeout,
        )

    def any(self, mine: bool) -> bool:
        """Whether it is true of some process; by the process group, so that all go on together. Collective."""
        flag = torch.full((1,), float(mine), device=self.device)
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


def cause(reasons: Sequence[str | None]) -> str | None:
    """Why a turn has failed, from what each process says: its own error, rather than that another one has left."""
    given = [reason for reason in reasons if reason is not None]
    own = [reason for reason in given if not any(word in reason for word in ("Connection", "aborted", "peer", "NCCL"))]
    return next(iter(own or given), None)


def _own_address() -> str:
    """An address of this machine that the others reach, as the process group has found it."""

    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _abandon_groups() -> None:
    """Ends all process groups without waiting for what they still exchange."""
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


def one_machine(meeting: Meeting) -> bool:
    """Whether all processes share a machine, and so a clock. Collective."""
    name = socket.gethostname()
    return bool(meeting.hold({"host": name}, lambda all_of: len({each["host"] for each in all_of}) == 1))
