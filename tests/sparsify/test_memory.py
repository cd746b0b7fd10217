"""Memories: what they add, send and keep."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightning_safusion.sparsify import (
    AutoMemory,
    DecoupledMomentum,
    DGCMemory,
    EF21Memory,
    Memory,
    NoMemory,
    ResidualMemory,
    TopK,
    resolve_memory,
    span_segments,
)
from lightning_safusion.sparsify.memory.contract import Flat
from lightning_safusion.testing import check_memory

AnyMemory = TypeVar("AnyMemory", bound=Memory)
EDGES = [0, 6, 7, 20, 20, 64]
CPU = torch.device("cpu")


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(b - a, generator=generator).to(dtype) for a, b in pairwise(EDGES)]


def compensate(memory: Memory, grads: list[Tensor], ids: list[int] | None = None) -> None:
    ids = list(range(len(grads))) if ids is None else ids
    mine = [grads[i] for i in ids]
    memory.compensate(ids, mine, [False] * len(ids), torch.stack([g.float().norm() for g in mine]))


def bound(memory: AnyMemory, world_size: int = 1) -> AnyMemory:
    memory.bind(EDGES, CPU, world_size)
    return memory


def send(memory: Memory, step: int, wire: torch.dtype = torch.float32) -> Tensor:
    """Selects 5 elements, rounds them as the wire does, commits them, and returns the update as a dense vector."""
    x = memory.accumulated(0, 64)
    selection = TopK().select(x, span_segments(64, 5), step)
    sent = selection.values.to(wire).float()
    update = torch.zeros(64).index_add_(0, selection.indices, sent)
    memory.commit(0, selection.indices, sent)
    return update


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_residual_conserves_the_sum_of_gradients(dtype: torch.dtype, wire: torch.dtype) -> None:
    memory = bound(ResidualMemory())
    assert memory.conserves
    total, sent = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for step in range(60):
        grads = gradients(step, dtype)
        total += torch.cat([g.double() for g in grads])
        compensate(memory, grads)
        sent += send(memory, step, wire).double()
        if step % 7 == 0:  # a piece that travels whole, rounded
            piece = memory.accumulated(7, 20).to(torch.bfloat16).float()
            sent[7:20] += piece.double()
            memory.commit_dense(7, 20, piece)
    torch.testing.assert_close(sent + memory.accumulated(0, 64).double(), total, rtol=0, atol=1e-5 * 60)
    assert grads[0].dtype == dtype


def test_rounding_errors_and_decay() -> None:
    memory = bound(ResidualMemory(decay=0.5))
    assert not memory.conserves
    grads = gradients(0)
    compensate(memory, grads)
    compensate(memory, grads, [0])
    torch.testing.assert_close(memory.accumulated(0, 6), 1.5 * grads[0])
    assert torch.equal(memory.accumulated(7, 20), grads[2])  # not fresh: not decayed
    memory.add(7, 20, torch.full((13,), 0.25))
    torch.testing.assert_close(memory.accumulated(7, 20), grads[2] + 0.25)


def test_decoupled_momentum_loses_what_was_sent() -> None:
    memory = bound(DecoupledMomentum(0.5))
    assert not memory.conserves
    for _ in range(2):
        compensate(memory, [torch.ones(b - a) for a, b in pairwise(EDGES)])
    memory.commit(0, torch.tensor([2]), torch.tensor([1.5]))
    memory.commit_dense(7, 20, memory.accumulated(7, 20).clone())
    assert memory.accumulated(0, 3).tolist() == [1.5, 1.5, 0.0]
    assert memory.accumulated(7, 20).tolist() == [0.0] * 13


def test_positions_without_a_value_are_refused() -> None:
    with pytest.raises((IndexError, RuntimeError), match="Number of indices"):
        bound(ResidualMemory()).commit(0, torch.tensor([1, 2, 5]), torch.tensor([1.5, 2.0]))


MEMORIES: dict[str, Callable[[], Memory]] = {
    "residual": ResidualMemory,
    "auto": AutoMemory,
    "decay": lambda: ResidualMemory(decay=0.5),
    "decoupled": DecoupledMomentum,
    "classic": DGCMemory,
    "nesterov": lambda: DGCMemory(nesterov=True),
    "clipped": lambda: DGCMemory(clip=0.3),
    "no momentum": lambda: DGCMemory(momentum=0.0),
    "ef21": EF21Memory,
    "none": NoMemory,
}


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_keeps_its_contract(name: str) -> None:
    check_memory(MEMORIES[name])


def test_state_of_another_layout_is_refused() -> None:
    memory = bound(DGCMemory())
    with pytest.raises(ValueError, match=r"'momentum' as a vector of 64 elements, got a tensor of shape \(3,\)"):
        memory.load_state_dict({"momentum": torch.zeros(3), "velocity": torch.zeros(3)})
    with pytest.raises(ValueError, match="got None"):
        memory.load_state_dict({"residual": torch.zeros(64)})


# -- DGC -------------------------------------------------------------------------------------------------------------


def test_dgc_identity_sent_and_velocity_are_the_summed_momentum() -> None:
    memory = bound(DGCMemory(momentum=0.9, masking=False))
    u, momentum, sent = (torch.zeros(64, dtype=torch.float64) for _ in range(3))
    for step in range(40):
        grads = gradients(step)
        momentum = 0.9 * momentum + torch.cat(grads).double()
        u += momentum
        compensate(memory, grads)
        sent += send(memory, step).double()
        torch.testing.assert_close(sent + memory.accumulated(0, 64).double(), u, rtol=1e-5, atol=1e-4)


def test_dgc_masking_zeroes_both_exactly_at_what_was_sent() -> None:
    memory = bound(DGCMemory())
    compensate(memory, gradients(0))
    compensate(memory, gradients(1))
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    hit = send(memory, 0) != 0
    for name, value in memory.state_dict().items():
        assert (value[hit] == 0).all()
        assert torch.equal(value[~hit], before[name][~hit])


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_dense_is_momentum_sgd(nesterov: bool) -> None:
    memory = bound(DGCMemory(momentum=0.8, nesterov=nesterov))
    weight = torch.zeros(64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.8, nesterov=nesterov)
    ours = torch.zeros(64)
    for step in range(12):
        grads = gradients(step)
        compensate(memory, grads)
        update = memory.accumulated(0, 64).clone()
        memory.commit_dense(0, 64, update)
        ours -= update
        weight.grad = torch.cat(grads)
        optimizer.step()
        torch.testing.assert_close(ours, weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dgc_clips_the_share_of_each_tensor(dtype: torch.dtype) -> None:
    memory = bound(DGCMemory(momentum=0.0, clip=0.5), world_size=4)
    grads = [*gradients(0, dtype)[:4], torch.full((44,), 1e-3, dtype=dtype)]
    grads[1] = torch.zeros(1, dtype=dtype)
    compensate(memory, grads)
    for i, grad in enumerate(grads):
        kept = memory.accumulated(EDGES[i], EDGES[i + 1])
        norm = float(grad.float().norm())
        assert float((kept / 4).norm()) <= 0.5 / math.sqrt(4) * (1 + 1e-5)
        torch.testing.assert_close(kept, grad.float() * min(1.0, 1.0 / max(norm, 1e-30)), rtol=1e-5, atol=0)


# -- none ------------------------------------------------------------------------------------------------------------


def test_no_memory_shows_only_the_gradients_of_this_window() -> None:
    memory = bound(NoMemory())
    first, second = gradients(0), gradients(1)
    send(memory, 0)  # a window in which no tensor has a gradient
    compensate(memory, first, [0, 1])
    compensate(memory, first, [2, 3, 4])
    assert torch.equal(memory.accumulated(0, 64), torch.cat(first))
    send(memory, 0)
    memory.commit_dense(0, 6, first[0])
    compensate(memory, second, [4])
    compensate(memory, second, [1])
    expected = torch.zeros(64)
    expected[20:], expected[6:7] = second[4], second[1]
    assert torch.equal(memory.accumulated(0, 64), expected)
    compensate(memory, first)  # what was never committed is forgotten
    assert torch.equal(memory.accumulated(0, 64), torch.cat(first))
    assert memory.state_dict() == {}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ResidualMemory, {"decay": 0}),
        (DecoupledMomentum, {"momentum": 0.0}),
        (DecoupledMomentum, {"momentum": 1.0}),
        (DGCMemory, {"momentum": 1.0}),
        (DGCMemory, {"clip": -1}),
        (EF21Memory, {"momentum": 1.0}),
    ],
)
def test_wrong_arguments_are_refused(kind: type[Memory], arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"got {next(iter(arguments.values()))}"):
        kind(**arguments)


def test_cuts_of_a_memory_are_not_kept_for_ever() -> None:
    """With layer drop other tensors are fresh in every step."""
    flat, alive = Flat(list(range(0, 2100, 100)), torch.device("cpu")), []
    for step in range(300):
        ids = tuple(place for place in range(20) if (step + 1) >> (place % 12) & 1)
        parts = flat.parts[ids]
        assert parts is not None
        alive.append(weakref.ref(parts.starts))
        del parts
    gc.collect()
    assert sum(starts() is not None for starts in alive) <= 32
    again = flat.parts[0, 2]
    assert flat.parts[0, 2] is again


@pytest.mark.parametrize("name", ["auto", "dgc", "ef21"])
def test_what_a_checkpoint_holds_leaves_the_device(name: str) -> None:
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        memory = resolve_memory(name)
        memory.bind(EDGES, device)
        flats = [value for value in vars(memory).values() if isinstance(value, Flat)]
        assert all(flat.data.device == device for flat in flats)
        memory.to_host()
        assert all(flat.data.is_cpu and flat.views[0].is_cpu for flat in flats)
        assert all(state.is_cpu for state in memory.state_dict().values())
