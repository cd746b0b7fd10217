"""Checksums: equal bits have equal checksums with every dtype; any single change is found."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_safusion.callbacks.replicas import (
    Checksums,
    checksum,
    checksums,
    digest,
    first_difference,
    flat_reals,
    largest_difference,
)

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7, 5), (70000,)])
def test_one_changed_bit_is_seen_and_a_copy_is_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, *shape)
    expected = checksum(tensor)
    assert expected.dtype == torch.int64
    assert checksum(tensor.clone()) == expected
    raw = flat_reals(tensor).view(torch.uint8)
    for place in {0, len(raw) // 2, len(raw) - 1}:
        for bit in (0x01, 0x80):
            raw[place] ^= bit
            assert checksum(tensor) != expected
            raw[place] ^= bit
    assert checksum(tensor) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
def test_changes_that_cancel_in_plain_sums_are_seen(dtype: torch.dtype) -> None:
    tensor = values(dtype, 200000)
    expected = checksum(tensor)
    swapped = tensor.clone()
    swapped[[3, 150003]] = tensor[[150003, 3]]
    flipped = tensor.clone()
    flipped[[10, 11]] *= -1
    for other in (swapped, flipped, tensor.roll(1), -tensor):
        assert checksum(other) != expected
    whole = values(dtype, 1 << 17)  # an even number of chunks, whatever the words
    assert checksum(whole.roll(1 << 16)) != checksum(whole)


def test_order_of_the_elements_in_memory_does_not_matter() -> None:
    tensor = torch.randn(4, 8, 6, 6)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == checksum(tensor)
    assert checksum(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == checksum(tensor)
    z = torch.randn(3, dtype=torch.complex64)
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)


def test_equal_nans_are_equal_and_empty_tensors_too() -> None:
    nan = torch.tensor([1.0, math.nan])
    assert checksum(nan) == checksum(nan.clone())
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_digests_see_names_shapes_and_dtypes_but_not_the_order() -> None:
    a, b = torch.zeros(4), torch.ones(2)
    expected = digest(checksums([("a", a), ("b", b)]))
    assert 0 <= expected < 1 << 56
    assert digest(checksums([("b", b), ("a", a)])) == expected
    others = [
        [("a", a), ("c", b)],
        [("a", a.view(2, 2)), ("b", b)],
        [("a", a.int()), ("b", b)],
        [("a", a)],
        [("a", b), ("b", a)],
    ]
    for tensors in others:
        assert digest(checksums(tensors)) != expected


def test_the_first_difference_is_described_from_the_majority() -> None:
    def rank(**changes: Tensor) -> Checksums:
        tensors = {"a": torch.zeros(3), "b": torch.ones(3), "c": torch.ones(3)} | changes
        return checksums(tensors.items())

    found = first_difference([rank(c=torch.zeros(3)), rank(b=torch.zeros(3)), rank(), rank()])
    assert (found.name, found.ranks, found.others, found.comparable) == ("b", (1,), (0, 2, 3), True)
    assert (found.count, found.total) == (2, 3)
    found = first_difference([rank(), rank(b=torch.zeros(3))])
    assert (found.ranks, found.others) == ((1,), (0,))
    found = first_difference([rank(), rank(), rank(d=torch.ones(1))])
    assert (found.name, found.ranks, found.others, found.comparable) == ("d", (2,), (0, 1), False)
    assert not first_difference([rank(), rank(a=torch.zeros(4))]).comparable
    with pytest.raises(ValueError, match="2 ranks are equal"):
        first_difference([rank(), rank()])


def test_largest_difference() -> None:
    a = torch.tensor([1.0, math.inf, math.nan, 2.0])
    assert largest_difference(a, a.clone()) == 0
    assert largest_difference(a, a + torch.tensor([0.0, 0.0, 0.0, 0.5])) == 0.5
    assert math.isnan(largest_difference(a, torch.tensor([math.nan, math.inf, math.nan, 2.0])))
    assert largest_difference(torch.tensor([3j]), torch.tensor([4 + 0j])) == 5
    assert largest_difference(torch.tensor([True]), torch.tensor([False])) == 1
    assert largest_difference(torch.zeros(0), torch.zeros(0)) == 0
