"""Virtual PowerSGD and averages in 16 bits against torch's hooks, and against plain averages."""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lab.virtual.powersgd import PowerSGD, _Matrices, orthogonalized
from lab.virtual.training import taken_gradients
from lab.virtual.workers import Rounded
from lightning_safusion.baselines.hooks import HookExchange
from lightning_safusion.fusion.layout import specs_from_parameters
from lightning_safusion.lookup import DDPHookName
from tests.models import weights
from tests.process_group import run_ranks

WORKERS, STEPS, START = 2, 8, 3


def network() -> nn.Module:
    """Matrices of several shapes, two of them equal, and one that is too small to be approximated."""
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 24, 3), nn.Flatten(), nn.Linear(24 * 36, 40), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 3))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 8, 8, generator=generator), torch.randint(3, (6,), generator=generator)


def backward(model: nn.Module, step: int, rank: int) -> None:
    inputs, classes = batch(step, rank)
    nn.functional.cross_entropy(model(inputs), classes).backward()


def gradients_of(model: nn.Module, step: int) -> list[list[Tensor]]:
    gradients = []
    for worker in range(WORKERS):
        backward(model, step, worker)
        gradients.append(taken_gradients(list(model.parameters())))
    return gradients


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_does_what_the_hook_of_torch_does(rank: int) -> None:
    def train(process: int) -> tuple[list[Tensor], list[int]]:
        model = network()
        order: list[int] = []
        ddp = DistributedDataParallel(model, bucket_cap_mb=1024)
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START)
        places = [param.data_ptr() for param in model.parameters()]

        def hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            order[:] = [places.index(param.data_ptr()) for param in bucket.parameters()]
            return powerSGD_hook(state, bucket)

        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            backward(ddp, step, process)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), order

    expected, order = run_ranks(WORKERS, train)[0]
    model = network()
    params = list(model.parameters())
    virtual = PowerSGD(specs_from_parameters(model.named_parameters()), order, WORKERS, rank, START)
    optimizer = torch.optim.SGD(params, 0.1)
    for step in range(STEPS):
        for param, mean in zip(params, virtual.average(gradients_of(model, step)), strict=True):
            param.grad = mean.view_as(param)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=1e-5)


def test_matrices_of_no_higher_rank_are_averaged_exactly() -> None:
    model = nn.Linear(60, 50)
    specs = specs_from_parameters(model.named_parameters())
    virtual = PowerSGD(specs, [1, 0], workers=2, rank=4, start=0)
    for step in range(3):
        torch.manual_seed(step)
        matrices = [torch.outer(torch.randn(50), torch.randn(60)) for _ in range(2)]
        biases = [torch.randn(50) for _ in range(2)]
        weight, bias = virtual.average([[m.flatten(), b] for m, b in zip(matrices, biases, strict=True)])
        torch.testing.assert_close(weight.view(50, 60), (matrices[0] + matrices[1]) / 2, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(bias, (biases[0] + biases[1]) / 2)
        assert virtual.bytes_sent == 4 * (4 * (50 + 60) + 50)


def test_matrices_of_one_shape_are_averaged_as_each_alone() -> None:
    q, gradients = torch.randn(3, 20, 2), [[torch.randn(300) for _ in range(3)] for _ in range(WORKERS)]
    together = _Matrices([0, 1, 2], (15, 20), q, torch.zeros(WORKERS, 3, 15, 20))
    alone = [_Matrices([i], (15, 20), q[i : i + 1], torch.zeros(WORKERS, 1, 15, 20)) for i in range(3)]
    for _ in range(3):
        means = together.average(gradients)
        for mean, each in zip(means, alone, strict=True):
            torch.testing.assert_close(mean, each.average(gradients)[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rank", [4, 6])
def test_columns_of_nearly_one_direction_become_orthonormal(rank: int) -> None:
    direction = torch.randn(3, 200, 1)
    basis = orthogonalized(direction + 1e-5 * torch.randn(3, 200, rank))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank).expand(3, -1, -1), rtol=0, atol=1e-5)


def test_what_was_not_sent_comes_later() -> None:
    model = nn.Linear(60, 50, bias=False)
    virtual = PowerSGD(specs_from_parameters(model.named_parameters()), [0], workers=2, rank=1, start=1)
    gradients = [[torch.randn(3000)] for _ in range(2)]
    total = torch.zeros(3000)
    for _ in range(200):
        total += virtual.average([[g.clone() for g in mine] for mine in gradients])[0]
    mean = (gradients[0][0] + gradients[1][0]) / 2
    assert float((total / 200 - mean).norm() / mean.norm()) < 0.2  # without feedback rank 1 misses 0.9 of it for ever


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_averages_in_16_bits_are_those_of_the_hooks(name: DDPHookName, dtype: torch.dtype) -> None:
    def averaged(process: int) -> list[Tensor]:
        ddp = DistributedDataParallel(network())
        HookExchange(name, None).register(ddp)
        backward(ddp, 0, process)
        return [param.grad.flatten() for param in ddp.parameters() if param.grad is not None]

    expected = run_ranks(WORKERS, averaged)[0]
    model = network()
    gradients = gradients_of(model, 0)
    rounded = Rounded(specs_from_parameters(model.named_parameters()), dtype)
    for mean, theirs, plain in zip(rounded.average(gradients), expected, gradients[0], strict=True):
        assert torch.equal(mean, theirs)
        assert not torch.equal(mean, plain)
    assert rounded.bytes_sent == 2 * sum(param.numel() for param in model.parameters())
