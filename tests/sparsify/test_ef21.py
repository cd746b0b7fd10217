"""EF21: what is sent moves an estimate, which is what the optimizer gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_safusion.sparsify import EF21Memory
from tests.sparsify.test_memory import CPU, EDGES, bound, compensate, gradients, send

WHOLE = (0, EDGES[-1])


def flat(step: int) -> Tensor:
    return torch.cat(gradients(step))


def receive(memory: EF21Memory, mean: Tensor, good: Tensor | None = None) -> Tensor:
    result = memory.received(*WHOLE, mean).clone()
    memory.settle(*WHOLE, good)
    return result


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_what_is_selected_from_is_the_average_less_what_was_sent(momentum: float) -> None:
    memory = bound(EF21Memory(momentum))
    average, sent = flat(0), torch.zeros(64)
    for step in range(5):
        compensate(memory, gradients(step))
        if step:
            average = momentum * average + (1 - momentum) * flat(step)
        torch.testing.assert_close(memory.accumulated(*WHOLE), average - sent, rtol=1e-5, atol=1e-5)
        sent += send(memory, step)


def test_the_estimate_is_the_mean_of_what_the_workers_have_sent() -> None:
    workers = [bound(EF21Memory()), bound(EF21Memory())]
    for step in range(6):
        for rank, worker in enumerate(workers):
            compensate(worker, gradients(10 * step + rank))
        mean = (send(workers[0], step) + send(workers[1], step)) / 2
        given = [receive(worker, mean) for worker in workers]
        assert torch.equal(*given)
        state = [worker.state_dict() for worker in workers]
        own = [s["average"] - s["difference"] for s in state]
        torch.testing.assert_close(given[0], (own[0] + own[1]) / 2, rtol=1e-5, atol=1e-5)
        assert torch.equal(state[0]["estimate"], given[0])


@pytest.mark.parametrize("good", [torch.tensor(False), torch.tensor(True)])
def test_a_window_that_the_device_finds_bad_moves_nothing(good: Tensor) -> None:
    memory = bound(EF21Memory())
    receive(memory, torch.ones(64))
    mean = torch.full((64,), 2.0) if good else torch.full((64,), torch.nan)
    receive(memory, mean, good)
    assert torch.equal(memory.state_dict()["estimate"], torch.full((64,), 3.0 if good else 1.0))


def test_only_pieces_that_are_settled_move() -> None:
    memory = bound(EF21Memory())
    assert torch.equal(memory.received(7, 20, torch.ones(13)), torch.ones(13))
    memory.settle(7, 10)
    assert memory.state_dict()["estimate"].nonzero().flatten().tolist() == [7, 8, 9]


def test_a_constant_gradient_becomes_the_estimate_and_stays() -> None:
    memory = bound(EF21Memory(momentum=0.0))
    gradient = gradients(0)
    for step in range(13):  # five of 64 elements in a step
        compensate(memory, gradient)
        given = receive(memory, send(memory, step))
    assert torch.equal(given, torch.cat(gradient))
    compensate(memory, gradient)
    assert not memory.accumulated(*WHOLE).any()


def test_a_first_gradient_that_is_withdrawn_was_never_there() -> None:
    for momentum in (0.0, 0.9):
        memory, twin = bound(EF21Memory(momentum)), bound(EF21Memory(momentum))
        compensate(memory, gradients(0))
        for tensor, gradient in enumerate(gradients(0)):
            memory.withdraw(tensor, gradient)
        assert not any(value.any() for value in memory.state_dict().values())
        for each in (memory, twin):
            compensate(each, gradients(1))
        assert torch.equal(memory.accumulated(*WHOLE), twin.accumulated(*WHOLE))


def test_without_momentum_a_withdrawn_gradient_leaves_the_next_one_what_it_was() -> None:
    memory, twin = bound(EF21Memory(0.0)), bound(EF21Memory(0.0))
    for each in (memory, twin):
        compensate(each, gradients(0))
        send(each, 0)
    compensate(memory, gradients(1))
    for tensor, gradient in enumerate(gradients(1)):
        memory.withdraw(tensor, gradient)
    for each in (memory, twin):
        compensate(each, gradients(2))
    torch.testing.assert_close(memory.accumulated(*WHOLE), twin.accumulated(*WHOLE), rtol=1e-5, atol=1e-6)


def test_a_first_gradient_of_zeros_does_not_count_after_a_restart_either() -> None:
    memory, twin = bound(EF21Memory()), bound(EF21Memory())
    compensate(memory, [torch.zeros_like(g) for g in gradients(0)])
    twin.load_state_dict({name: value.clone() for name, value in memory.state_dict().items()})
    for each in (memory, twin):
        compensate(each, gradients(1))
        assert torch.equal(each.accumulated(*WHOLE), flat(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_averaged_in_float32(dtype: torch.dtype) -> None:
    memory = bound(EF21Memory())
    for step in range(3):
        compensate(memory, gradients(step, dtype))
    average = flat(0).to(dtype).float()
    for step in (1, 2):
        average += 0.2 * (flat(step).to(dtype).float() - average)
    torch.testing.assert_close(memory.accumulated(*WHOLE), average, rtol=1e-6, atol=1e-6)


def test_the_estimate_moves_with_its_tensor() -> None:
    memory = EF21Memory()
    memory.bind([0, 2, 5], CPU)
    memory.received(0, 5, torch.arange(5.0))
    memory.settle(0, 5)
    memory.permute([1, 0], [0, 3, 5])
    assert memory.state_dict()["estimate"].tolist() == [2, 3, 4, 0, 1]
    # the next step is given from its new place
    assert memory.received(0, 5, torch.ones(5)).tolist() == [3, 4, 5, 1, 2]
