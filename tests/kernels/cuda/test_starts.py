"""Kernels are started again without asking Triton, and always those that Triton would start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from lab.kernels.compiling import Target
from lightning_safusion.kernels.cuda import launch
from lightning_safusion.kernels.cuda.launch import start
from tests.kernels.cuda.compiled import Made
from tests.packaging.environments import ROOT, run

asked: list[str] = []  # kernels for which Triton was asked


def kernel(out: Any, keys: Any, count: Any, room: Any, factor: Any, BITS: tl.constexpr, FIRST: tl.constexpr) -> None:
    """Is never run."""


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    driver, before, triton_run = triton.runtime.driver, dict(triton.runtime.driver.__dict__), JITFunction.run

    def noting(self: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(self.fn.__name__)
        return triton_run(self, *arguments, **options)

    monkeypatch.setattr(triton.compiler, "compile", Made)
    monkeypatch.setattr(JITFunction, "run", noting)
    monkeypatch.setattr(launch, "_started", {})
    driver.set_active(Target("90", 0))
    yield
    driver.__dict__.clear()
    driver.__dict__.update(before)


def jitted() -> Any:
    return JITFunction(kernel, do_not_specialize=["room"], do_not_specialize_on_alignment=["keys"])


def tensors() -> list[Tensor]:
    memory = torch.zeros(64, dtype=torch.int32)
    aligned = memory[-memory.data_ptr() // 4 % 4 :]
    return [part.view(kind) for part, kind in product((aligned, aligned[1:]), (torch.int32, torch.float32))]


def once(work: Any, *arguments: Any) -> tuple[Any, ...]:
    Made.started.clear()
    work(*arguments)
    [found] = Made.started
    return found


CALLS = st.tuples(
    st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1, 2, 16, 1 << 40, True]), st.sampled_from([1, 16]),
    st.sampled_from([0.5, 1.0, 2]), st.sampled_from([8, 11]), st.booleans(),
)  # fmt: skip


@given(CALLS, CALLS)
def test_what_triton_would_start_is_started(call: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    own, held = jitted(), tensors()
    calls = [call, *((*call[:at], other[at], *call[at + 1 :]) for at in range(len(call)))]
    launch._started.clear()
    for programs, (out, keys, count, room, factor, bits, first) in enumerate(calls + calls, 1):
        arguments, constants = (held[out], held[keys], count, room, factor), {"FIRST": first, "BITS": bits}
        wanted = once(start, own, programs, arguments, constants)
        found = once(lambda p, a, c: launch.launch(own, p, *a, **c), programs, arguments, constants)
        assert found[0] == wanted[0]
        assert found[1:4] == (programs, 1, 1)
        assert found[4:7] == (0, wanted[5], None)
        assert found[10:] == wanted[10:]


def begin(own: Any, held: list[Tensor], out: int = 0, bits: int = 8) -> bool:
    """Starts a kernel; returns whether Triton was asked."""
    asked.clear()
    launch.launch(own, 1, held[out], held[0], 5, 7, 0.5, BITS=bits, FIRST=True)
    return bool(asked)


def test_triton_is_asked_once() -> None:
    own, held = jitted(), tensors()
    assert [begin(own, held) for _ in range(3)] == [True, False, False]
    assert [begin(own, held, out=2) for _ in range(2)] == [True, False]
    assert [begin(own, held, bits=11) for _ in range(2)] == [True, False]
    assert not begin(own, held)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_every_launch(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    own, held = jitted(), tensors()
    begin(own, held)
    with monkeypatch.context() as patch:
        patch.setattr(launch._HOOKS, hook, print)
        assert begin(own, held)
        assert any(given is print for given in Made.started[-1])
    assert not begin(own, held)


def test_a_hook_of_the_kernel_is_called() -> None:
    own, held = jitted(), tensors()
    begin(own, held)
    told: list[int] = []
    own.pre_run_hooks.append(lambda *arguments, **options: told.append(1))
    begin(own, held)
    assert told == [1]


def test_another_device_than_the_current_one_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    own, held, current = jitted(), tensors(), [0]

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor.get_device())
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(Target, "get_current_device", lambda self: current[-1])
    monkeypatch.setattr(Target, "get_current_stream", lambda self, device: 100 + device)
    monkeypatch.setattr(Tensor, "get_device", lambda tensor: 1)
    assert [begin(own, held) for _ in range(2)] == [True, True]
    assert Made.started[-1][4] == 101
    current.append(1)
    assert [begin(own, held) for _ in range(2)] == [True, False]
    assert Made.started[-1][4] == 101
    current.append(0)
    assert begin(own, held)
    assert Made.started[-1][4] == 101
    monkeypatch.setattr(Tensor, "get_device", lambda tensor: -1)  # memory of the host, which all devices read
    assert [begin(own, held) for _ in range(2)] == [True, False]
    current.append(1)
    assert not begin(own, held)
    current.append(2)
    assert begin(own, held)


def test_not_all_launches_are_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_VARIANTS", 3)
    own, held = jitted(), tensors()
    assert all(begin(own, held, bits=bits) for bits in range(5))
    assert not begin(own, held, bits=4)
    assert begin(own, held, bits=0)


@pytest.mark.slow
def test_triton_starts_nothing_in_later_windows(tmp_path: Path) -> None:
    code = "import json; from lab.kernels.launches import compared; print(json.dumps(compared()))"
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = json.loads(run(sys.executable, "-c", code, **{**os.environ, **variables}))
    assert {name: own[1:] for name, own in found.items()} == dict.fromkeys(found, [0, 0])
    assert all(launches >= 8 for launches, *_ in found.values())


@pytest.mark.slow
def test_what_a_job_compiles_is_bounded_and_at_its_start() -> None:
    """The usual kind leaves nothing to its windows; others leave some to the first two, from which nobody plans."""
    printed = run(
        sys.executable, "-m", "tests.kernels.cuda.compiled", cwd=ROOT, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT)
    )
    found = json.loads(printed)
    assert found["start"] <= 12
    assert not any(map(any, found["usual"]))
    assert all(0 < sum(counts) <= 8 for counts in found["others"])
    assert not any(any(counts[2:]) for counts in found["others"])
