"""What the host takes to start a kernel, by a driver that starts nothing; no device is needed.

    $ python -m lab launches

Compiles what a buffer of the default needs for sm_90, and starts the launches of a window again and again: by Triton,
which asks all arguments what they are, and as the package does, for which that is asked once. Processor time: other
programs on the machine lengthen it, so that only the two beside each other can be compared. What CUDA takes comes on
top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from lab.kernels.compiling import Target, compile_buffer, compile_owner, tables
from lab.markdown import markdown
from lightning_safusion.kernels.cuda import launch as launching
from lightning_safusion.kernels.cuda.launch import VERSION, launch, start

#: A launch: kernel, programs, arguments, constants.
Launch = tuple[Any, int, tuple[Any, ...], dict[str, Any]]
#: Windows of a buffer. The first one compiles, and the second is the first with the other of two verdicts.
WINDOWS = 3
#: What starts the windows of a buffer, so many: the default by update; with pooled quotas and without units; shards.
JOBS: dict[str, Callable[[int], None]] = {
    "default": lambda windows: compile_buffer(tables(0, 0), 0, windows),
    "pooled": lambda windows: compile_buffer(tables(200, 0), None, windows),
    "shards": lambda windows: compile_owner(tables(0, 0), 0, windows),
}


class IdleDriver(Target):
    """Stands in for a driver: kernels are compiled, and loaded and started as far as Triton can tell.

    Attributes:
        latest: What was started last: programs, stream, kernel and arguments.
    """

    def __init__(self) -> None:
        super().__init__("90", 0)
        self.utils, self._loaded = self, 0
        self.latest: tuple[Any, ...] = ()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return self._start

    def _start(self, *given: Any) -> None:
        self.latest = given

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        self._loaded += 1
        loaded = self._loaded, self._loaded, 32, 0  # module, function, registers, spills
        return loaded if VERSION < (3, 4) else (*loaded, 1024)  # threads

    def unload_module(self, module: int) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


@contextmanager
def noted() -> Iterator[tuple[list[Launch], list[int]]]:
    """All launches of buffers, and the numbers of those that Triton itself has started."""
    launches: list[Launch] = []
    by_triton: list[int] = []
    run = JITFunction.run

    def note(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        launches.append((kernel, programs, arguments, constants))
        launch(kernel, programs, *arguments, **constants)

    def noting(kernel: Any, *arguments: Any, **options: Any) -> Any:
        by_triton.append(len(launches) - 1)
        return run(kernel, *arguments, **options)

    with patch.object(launching, "launch", note), patch.object(JITFunction, "run", noting):
        yield launches, by_triton


def compared() -> dict[str, tuple[int, int, int]]:
    """By job: launches of its last window; how many of them Triton has started, and would have started otherwise."""
    driver, found = IdleDriver(), {}
    triton.runtime.driver.set_active(driver)
    for name, job in JOBS.items():
        with noted() as (launches, by_triton):
            job(WINDOWS)
        first = len(launches) - len(launches) // WINDOWS
        others = sum(_started(driver, start, each) != _started(driver, _again, each) for each in launches[first:])
        found[name] = len(launches) - first, sum(place >= first for place in by_triton), others
    return found


def _again(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    launch(kernel, programs, *arguments, **constants)


def _started(driver: IdleDriver, begin: Callable[..., object], given: Launch) -> list[Any]:
    """What the driver is given by a launch: tensors by their addresses, and without what profilers are told."""
    begin(*given)
    told = [each.data_ptr() if isinstance(each, Tensor) else each for each in driver.latest]
    return told[:6] + told[9:]


def _microseconds(begin: Callable[[], object], repeats: int) -> float:
    """Processor time of a call, the least of five."""
    times = []
    for _ in range(5):
        before = time.process_time()
        for _ in range(repeats):
            begin()
        times.append(time.process_time() - before)
    return 1e6 * min(times) / repeats


def launches(repeats: int = 2000) -> None:
    """What the host takes to start a kernel, by a driver that starts nothing.

    Args:
        repeats: Launches of each kernel, five times.
    """
    triton.runtime.driver.set_active(IdleDriver())
    with noted() as (found, _):
        JOBS["default"](WINDOWS)
    rows: list[tuple[object, ...]] = []
    sums = [0.0, 0.0]
    last = found[-(len(found) // WINDOWS) :]
    for kernel, programs, arguments, constants in last:
        anew = _microseconds(partial(start, kernel, programs, arguments, constants), repeats)
        again = _microseconds(partial(launch, kernel, programs, *arguments, **constants), repeats)
        rows.append((f"`{kernel.fn.__name__}`", len(arguments) + len(constants), f"{anew:.1f}", f"{again:.1f}"))
        sums = [sums[0] + anew, sums[1] + again]
    rows.append(("mean", "", *(f"{each / len(last):.1f}" for each in sums)))
    print(f"Triton {triton.__version__}, microseconds of processor time per launch\n")
    print(markdown(("kernel", "arguments", "by Triton", "again"), rows))
