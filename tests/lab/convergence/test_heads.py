"""The network with two heads: one counts for less in the loss, and goes missing where elements of tensors compete."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.convergence.plan import HEADS, WEIGHED
from lab.convergence.scheme import Scheme
from lab.convergence.training import train
from lab.tasks import Digits, DigitsTwice, loss
from lab.tasks.models import TwoHeads

WEIGHT = 0.125  # a power of two: products with it are exact


def trained(weight: float) -> TwoHeads:
    torch.manual_seed(0)
    model = TwoHeads(weight, width=4)
    loss(model, *DigitsTwice(0, 8).samples(0)).backward()
    return model


def test_the_weight_scales_gradients_of_the_second_head_and_no_scores() -> None:
    whole, part = trained(1.0), trained(WEIGHT)
    images, _ = DigitsTwice(0, 8).samples(1)
    torch.testing.assert_close(part(images), whole(images), rtol=0, atol=0)
    assert part(images).shape == (8, 2, 10)
    for head, factor in enumerate((1.0, WEIGHT)):
        for ours, theirs in zip(part.heads[head].parameters(), whole.heads[head].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, factor * theirs.grad, rtol=1e-6, atol=0)


def test_each_image_has_its_class_twice() -> None:
    once, twice = ((data.samples(5), data.validation()) for data in (Digits(3, 16), DigitsTwice(3, 16)))
    for (images, labels), (same, pairs) in zip(once, twice, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(pairs, torch.stack([labels, labels], 1))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [replace(each, memory="none") for each in WEIGHED], ids=lambda each: each.method)
def test_what_goes_missing_behind_fusion(scheme: Scheme) -> None:
    missing = train(replace(HEADS, steps=10), scheme, seed=0).missing
    assert missing > 0.1 if scheme.method == "behind" else missing == 0
