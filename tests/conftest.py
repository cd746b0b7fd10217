"""Conditions that every test starts from."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from lightning_utilities.core.rank_zero import rank_zero_only

from lab.gpu.interpreter import quicken

pytest_plugins = ["tests.budget"]

if not torch.cuda.is_available():
    # Before anything imports Triton (transformers does): kernels are tested in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, none of them too late: machines of continuous integration are slow and shared.
# To look for new ones: pytest --hypothesis-profile=search
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=30, suppress_health_check=list(HealthCheck)
)
settings.register_profile("search", settings.get_profile("fixed"), derandomize=False, max_examples=300, print_blob=True)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses tests that may be run again, or take long among the quick ones, without saying why; hurries Triton."""
    for item in items:
        for name, needed in (("flaky", "say what it depends on"), ("costly", "say why it must be a quick test")):
            marker = item.get_closest_marker(name)
            if marker is not None and not marker.kwargs.get("reason"):
                raise pytest.UsageError(f"{item.nodeid} is marked {name} without a reason: {needed}")
    if "triton" in sys.modules:
        quicken()


@pytest.fixture(scope="session", autouse=True)
def _small_process() -> Iterator[None]:
    """One thread: small tensors gain nothing from more, and a process that has a thread pool must not be forked."""
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Lightning gives a node with one device all cores
    gc.freeze()  # gc.collect() does not look through all that is imported, in this process and those that are forked
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _short_beginnings() -> Iterator[None]:
    """What every training begins with takes no time: links are not timed, installed packages are searched once."""
    from lightning.fabric.utilities import registry  # not before Triton's interpreter has been chosen

    from lightning_safusion.comm.cost import LinearCost
    from lightning_safusion.fusion import build

    with pytest.MonkeyPatch.context() as patch:
        costs = {"allgather": LinearCost(2e-4, 1e-9), "allreduce": LinearCost(4e-4, 2e-9)}
        patch.setattr(build, "calibrate", lambda transport, device: dict(costs))
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        registry._load_external_callbacks("lightning.pytorch.callbacks_factory")
        yield


@pytest.fixture(scope="session")
def compiler() -> None:
    """What the first compilation imports and builds, once: every process that is forked later has it."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.zeros(1, 1))
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Takes back what Lightning and torch.distributed leave in a process: variables, the rank of whom warnings are, and
    the default process group."""
    environment = dict(os.environ)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
