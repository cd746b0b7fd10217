"""Runs a function on several ranks of a real gloo process group, inside a test."""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 5.0  # seconds that the other ranks get to report after the first failure


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, group: bool = True
) -> list[Any]:
    """Calls ``fn(rank, *args)`` in ``world_size`` forked processes that share a gloo process group.

    Forked children see closures, fixtures and patched modules of the test; they compute with one thread.
    ``fn`` may have anything for its result that can be pickled; results come in rank order. ``timeout`` is in seconds,
    for everything and for each collective; without ``group`` there is no process group.

    Raises:
        RuntimeError: If a rank raised or died; the message holds the tracebacks of all ranks that failed.
        TimeoutError: If a rank did not end in time. No process is left behind in any case.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        processes: list[ForkProcess] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe()
                store = os.path.join(folder, "store") if group else None
                process = context.Process(target=_child, args=(sender, rank, world_size, store, timeout, fn, args))
                process.start()
                sender.close()
                processes.append(process)
                pipes[receiver] = rank
            results = _collect(pipes, timeout)
            for pipe, process in zip(pipes, processes, strict=True):
                pipe.send_bytes(b"all ranks have reported")
                process.join(_GRACE)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _child(
    sender: Connection, rank: int, world_size: int, store: str | None, timeout: float, fn: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in conftest.py, with what has been imported since
    try:
        if store is not None:
            place = {"store": dist.FileStore(store, world_size), "rank": rank, "world_size": world_size}
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **place)
        sender.send_bytes(pickle.dumps((True, fn(rank, *args))))
        # A rank that leaves early closes connections that others may still be opening or reading from.
        sender.poll(timeout)
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return  # it may have left operations alone, whose end destroying the group would wait for
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(pipes: dict[Connection, int], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 (from our own child)
            except EOFError:
                succeeded, value = False, "the process died without a report\n"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"rank {rank} of {len(pipes)} failed:\n{value}")
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        raise RuntimeError("\n".join(failures))  # in the order of arrival: the cause comes first
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not end within {timeout} s")
    return [results[rank] for rank in range(len(pipes))]


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
    """Calls ``fn(*args)`` in a forked process of its own, and returns its result; for what cannot be undone."""
    return run_ranks(1, lambda rank: fn(*args), timeout=timeout, group=False)[0]


def run_launched(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls ``fn(rank, *args)`` in processes that look to Lightning as if torchrun had started them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def launched(rank: int) -> Any:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        return fn(rank, *args)

    return run_ranks(world_size, launched, timeout=timeout, group=False)


def run_script(script: Path, folder: Path, world_size: int = 2) -> list[str]:
    """What a script prints, warns and logs on each rank, in processes that look as if torchrun had started them.

    They have imported already what the test has, which takes most of the time of a small script.
    """

    def run(rank: int) -> str:
        os.chdir(folder)
        os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        sys.argv = [str(script)]
        printed = io.StringIO()
        logging.getLogger("lightning").addHandler(logging.StreamHandler(printed))
        with redirect_stdout(printed), redirect_stderr(printed):
            runpy.run_path(str(script), run_name="__main__")
        return printed.getvalue()

    return run_launched(world_size, run, timeout=120)
