"""DeMo and SparseLoCo: what is sent and what stays, and what they are where everything is sent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lab.convergence.scheme import parse_scheme
from lab.convergence.training import make_optimizers
from lab.tasks import TASKS
from lab.virtual.chunks import Chunks, DeMo, SparseLoCo, cosines, largest, of_two_bits, over_senders
from lightning_safusion.fusion.layout import specs_from_parameters


@pytest.mark.parametrize("shape", [(96, 384), (7,), (1,), (130, 67), (3, 4, 5)])
def test_chunks_are_put_together_again(shape: tuple[int, ...]) -> None:
    (spec,) = specs_from_parameters([("x", nn.Parameter(torch.randn(shape)))])
    chunks, x = Chunks.of(spec), torch.randn(math.prod(shape))
    cut = chunks.cut(x)
    assert cut.shape[1:] == chunks.sides
    assert max(chunks.sides) <= 64
    assert torch.equal(chunks.joined(cut), x)


def test_a_chunk_is_a_square_of_the_matrix() -> None:
    x = torch.arange(128 * 128.0)
    cut = Chunks(128, 128).cut(x)
    assert torch.equal(cut[1], x.view(128, 128)[:64, 64:])


@pytest.mark.parametrize("size", [1, 2, 48, 64])
def test_cosines_are_orthonormal(size: int) -> None:
    assert torch.allclose(cosines(size) @ cosines(size).T, torch.eye(size), atol=1e-5)


def test_each_chunk_sends_its_largest() -> None:
    x = torch.tensor([[[1.0, -5.0], [3.0, 0.5]], [[0.1, 0.2], [-0.4, 0.3]]])
    expected = torch.tensor([[[0.0, -5.0], [3.0, 0.0]], [[0.0, 0.0], [-0.4, 0.3]]])
    assert torch.equal(largest(x, 0.5), expected)
    assert int(largest(x, 0.001).count_nonzero()) == 2


def test_two_bits_are_a_sign_and_one_of_two_means() -> None:
    coded = of_two_bits(torch.tensor([[[0.0, -1.0], [3.0, 8.0]]]))
    assert torch.equal(coded, torch.tensor([[[0.0, -2.0], [2.0, 8.0]]]))
    assert not of_two_bits(torch.zeros(1, 2, 2)).any()


def test_an_entry_is_averaged_over_the_workers_that_sent_it() -> None:
    sent = torch.tensor([[2.0, 0.0, 3.0, 0.0], [0.0, 0.0, 5.0, -1.0], [0.0, 0.0, 1.0, -3.0]])
    assert over_senders(sent).tolist() == [2.0, 0.0, 3.0, -2.0]


def test_a_step_is_that_of_the_only_sender() -> None:
    specs = specs_from_parameters([("x", nn.Parameter(torch.zeros(2, 4)))])
    lone, silent = torch.eye(1, 8).flatten(), torch.zeros(8)
    (alone,) = SparseLoCo(specs, 0.1).average([[lone.clone()]])
    (among,) = SparseLoCo(specs, 0.1).average([[lone.clone()], *([silent.clone()] for _ in range(3))])
    assert alone.any()
    assert torch.equal(among, alone)


def test_demo_steps_by_sign_and_keeps_what_it_did_not_send() -> None:
    model = nn.Linear(64, 64, bias=False)
    gradients = [[torch.randn(4096)] for _ in range(2)]
    specs = specs_from_parameters(model.named_parameters())
    (step,) = DeMo(specs, 1.0).average([[g.clone() for g in of_one] for of_one in gradients])
    mean = (gradients[0][0] + gradients[1][0]) / 2
    large = mean.abs() > 1e-4  # others may be rounded to either side
    assert torch.equal(step[large], mean.sign()[large])

    demo = DeMo(specs, 0.01, decay=1.0)
    demo._begin([torch.zeros(2, 4096)])
    total = torch.zeros(2, 4096)
    for _ in range(40):
        gradient = torch.randn(2, 4096)
        total += gradient
        sent = demo._sent(0, gradient)
        assert sent.flatten(1).count_nonzero(1).tolist() == [41, 41]
        total -= demo._chunks[0].joined(cosines(64).T @ sent @ cosines(64))
    assert torch.allclose(demo._kept[0], total, atol=1e-3)
    assert demo.bytes_sent == math.ceil(41 * (12 + 16) / 8)


def test_sparseloco_with_everything_sent_is_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    other = nn.Linear(8, 4, bias=False)
    other.load_state_dict(model.state_dict())
    averager = SparseLoCo(specs_from_parameters(model.named_parameters()), 1.0)
    adamw = torch.optim.AdamW(other.parameters(), 0.1, betas=(0.9, 0.99), weight_decay=0.0)
    gradient = torch.randn(4, 8).sign()  # steps of one size, which two bits hold exactly
    for factor in (1.0, 0.5, 2.0):
        (step,) = averager.average([[factor * gradient.flatten()]])
        other.weight.grad = factor * gradient
        adamw.step()
        with torch.no_grad():
            model.weight.sub_(0.1 * step.view_as(model.weight))
        assert torch.allclose(model.weight, other.weight, atol=1e-5)


def test_their_steps_go_to_plain_descent_and_are_not_clipped() -> None:
    params = [nn.Parameter(torch.ones(3))]
    for method in ("demo", "sparseloco"):
        (optimizer,) = make_optimizers(TASKS["bytes-transformer"], parse_scheme(f"{method}[lr_scale=0.5]"), params)
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.defaults["momentum"] == 0.0
        assert optimizer.defaults["lr"] == 0.5 * TASKS["bytes-transformer"].lr
        with pytest.raises(ValueError, match=f"{method} makes steps.*prose-transformer.*clip"):
            make_optimizers(TASKS["prose-transformer"], parse_scheme(method), params)
