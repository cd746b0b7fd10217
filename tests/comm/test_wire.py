from __future__ import annotations

import contextlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import available_wires, resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection
from lightning_safusion.sparsify.selection.native import FoundSelection

QUANTIZED = {"q4": 4, "q2": 2, "sign": 1}
EXPLICIT = [wire for wire in available_wires() if "-" in wire and wire.rpartition("-")[2] not in QUANTIZED]
SPANS = [1, 2, 31, 32, 33, 1000, 65535, 65536, 65537, 200_000]


def draw(numel: int, count: int, seed: int = 0) -> Selection:
    """A random selection whose values all value dtypes hold exactly."""
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(numel, count, replace=False))
    values = rng.integers(1, 128, count) * rng.choice([-0.25, 0.25], count)
    return Selection(torch.from_numpy(indices), torch.from_numpy(values).float(), count)


def on_accelerator(selection: Selection, length: int) -> Selection:
    """The same selection as an accelerator would give it: padded, and the count in a tensor."""
    extra = length - selection.indices.numel()
    anywhere = (
        selection.indices[:1].expand(extra) if selection.indices.numel() else torch.zeros(extra, dtype=torch.int64)
    )
    return Selection(
        torch.cat([selection.indices, anywhere]),
        torch.cat([selection.values, torch.zeros(extra)]),
        torch.tensor([selection.indices.numel()]),
    )


def message(codec: Codec, garbage: int = 255) -> Tensor:
    return torch.full((codec.nbytes,), garbage, dtype=torch.uint8)


def scattered(codec: Codec, indices: Tensor, values: Tensor) -> Tensor:
    """The dense span; padding adds 0 to it."""
    return torch.bincount(indices, values, minlength=codec.numel)


def check_round_trip(codec: Codec, selection: Selection) -> None:
    out = message(codec)
    sent = codec.encode(selection, out)
    torch.testing.assert_close(sent, selection.values, rtol=0, atol=0)

    indices, values = codec.decode(out)
    assert indices.dtype == torch.int64
    assert values.dtype == torch.float32
    assert bool((indices.diff() > 0).all())
    if codec.layout == "dense":
        assert len(indices) == codec.numel
    else:
        assert torch.equal(indices, selection.indices)
        assert torch.equal(values, selection.values)
    expected = scattered(codec, selection.indices, selection.values)
    assert torch.equal(scattered(codec, indices, values), expected)

    indices, values = codec.decode_padded(out)
    assert len(indices) == (codec.numel if codec.layout == "dense" else codec.capacity)
    assert bool(((indices >= 0) & (indices < codec.numel)).all())
    assert torch.equal(scattered(codec, indices, values), expected)


@pytest.mark.parametrize("wire", EXPLICIT)
@pytest.mark.parametrize("numel", SPANS)
def test_decode_inverts_encode(wire: str, numel: int) -> None:
    capacity = max(1, numel // 10)
    codec = resolve_codec(wire, numel, capacity, torch.float32)
    for count in {0, 1, capacity // 2, capacity}:
        check_round_trip(codec, draw(numel, count, seed=count))


@pytest.mark.parametrize("wire", EXPLICIT)
@pytest.mark.parametrize("numel", [1, 33, 65537])
def test_decode_inverts_encode_of_a_full_span(wire: str, numel: int) -> None:
    check_round_trip(resolve_codec(wire, numel, numel, torch.float32), draw(numel, numel))


@pytest.mark.parametrize("wire", EXPLICIT)
def test_positions_at_the_edges_of_blocks(wire: str) -> None:
    indices = torch.tensor([0, 65535, 65536, 131071, 196607, 196608, 199_999])  # the second block has one entry less
    selection = Selection(indices, torch.arange(1.0, 8.0), 7)
    check_round_trip(resolve_codec(wire, 200_000, 9, torch.float32), selection)


@pytest.mark.parametrize("layout", ["eliasfano", "block16", "block8", "coo", "bitmap"])
def test_positions_above_two_to_the_24(layout: str) -> None:
    """Test T16: float32 could not hold these positions."""
    numel = 2**24 + 70_001
    indices = torch.tensor([2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, numel - 2, numel - 1])
    selection = Selection(indices, torch.arange(1.0, 7.0), 6)
    codec = resolve_codec(f"{layout}-bf16", numel, 8, torch.float32)
    out = message(codec)
    codec.encode(selection, out)
    for decoded, values in (codec.decode(out), codec.decode_padded(out)):
        assert torch.equal(decoded[:6], indices)
        assert torch.equal(values[:6], selection.values)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "wire",
    [
        "eliasfano-fp32",
        "eliasfano-q4",
        "eliasfano-fp16",
        "block16-fp32",
        "block8-q4",
        "block16-sign",
        "coo-q2",
        "bitmap-bf16",
        "dense-fp32",
    ],
)
def test_messages_are_read_piece_by_piece(wire: str, compiled: bool) -> None:
    numel, count = 200_001, 9000
    indices = torch.randperm(numel, generator=torch.Generator().manual_seed(0))[:count].sort().values
    codec = resolve_codec(wire, numel, count + 7, torch.float32, (0, 70_000, 70_000, numel))
    out = message(codec)
    codec.encode(Selection(indices, torch.randn(count), count), out)
    with contextlib.nullcontext() if compiled else native.unused():
        whole, every = codec.decode(out)
        read = codec.reader(out)
        for start, stop in ((0, numel), (0, 0), (65_536, 131_072), (1, 2), (70_000, 70_001), (199_999, numel), (5, 9)):
            found, values = read(start, stop)
            inside = (whole >= start) & (whole < stop)
            assert torch.equal(found, whole[inside])
            assert torch.equal(values, every[inside])
        for start in range(0, numel, 777):  # in order, at any place in a byte and a block
            stop = min(start + 777, numel)
            found, values = read(start, stop)
            inside = (whole >= start) & (whole < stop)
            assert torch.equal(found, whole[inside])
            assert torch.equal(values, every[inside])


@pytest.mark.parametrize("layout", ["eliasfano", "block16"])
def test_positions_above_two_to_the_31(layout: str) -> None:
    numel = 2**31 + 100_000
    indices = torch.tensor([5, 2**31 - 1, 2**31, numel - 1])
    codec = resolve_codec(f"{layout}-fp32", numel, 5, torch.float32)
    out = message(codec)
    codec.encode(Selection(indices, torch.ones(4), 4), out)
    assert torch.equal(codec.decode(out)[0], indices)
    assert torch.equal(codec.decode_padded(out)[0][:4], indices)


def test_coo_refuses_long_spans() -> None:
    with pytest.raises(ValueError, match=r"2147483648 elements.*use block16"):
        resolve_codec("coo-fp32", 2**31, 10, torch.float32)
    assert resolve_codec("coo-fp32", 2**31 - 1, 10, torch.float32).nbytes == 84
    assert resolve_codec("fp32", 2**40, 10, torch.float32).name == "eliasfano-fp32"


@pytest.mark.parametrize("wire", EXPLICIT)
@pytest.mark.parametrize("count", [0, 1, 150, 170])
def test_accelerator_selections_give_the_same_bytes(wire: str, count: int) -> None:
    codec = resolve_codec(wire, 70_001, 171, torch.float32)
    selection = draw(70_001, count)
    exact, padded = message(codec, 255), message(codec, 170)
    codec.encode(selection, exact)
    sent = codec.encode(on_accelerator(selection, 170), padded)
    assert torch.equal(exact, padded)
    assert torch.equal(sent[:count], selection.values)
    assert not sent[count:].any()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("wire", [wire for wire in available_wires() if "-" in wire])
def test_positions_of_32_bits_give_the_same_bytes(wire: str, odd: bool, compiled: bool) -> None:
    selection = draw(5000, 700)
    if odd:
        selection.values[5] = float("inf")
    codec = resolve_codec(wire, 5000, 900, torch.float32, (0, 1500, 5000))
    found = FoundSelection(selection.indices.int(), selection.values)
    expected, out = message(codec), message(codec, 7)
    sent = codec.encode(selection, expected)
    with contextlib.nullcontext() if compiled else native.unused():
        assert torch.equal(codec.encode(found, out).nan_to_num(7), sent.nan_to_num(7))
    assert out.tolist() == expected.tolist()
    assert torch.equal(found.indices, selection.indices)


@pytest.mark.parametrize("wire", EXPLICIT)
def test_every_byte_is_written(wire: str) -> None:
    for numel, capacity in ((7, 3), (65537, 5), (100, 0)):
        codec = resolve_codec(wire, numel, capacity, torch.float32)
        selection = draw(numel, min(capacity, 2))
        first, second = message(codec, 0), message(codec, 255)
        codec.encode(selection, first)
        codec.encode(selection, second)
        assert torch.equal(first, second)


@pytest.mark.parametrize("wire", EXPLICIT)
def test_non_finite_values_survive(wire: str) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), 2.0])
    codec = resolve_codec(wire, 10, 5, torch.float32)
    out = message(codec)
    sent = codec.encode(Selection(torch.arange(2, 7), values, 5), out)
    torch.testing.assert_close(sent, values, equal_nan=True, rtol=0, atol=0)
    dense = torch.zeros(10)
    indices, decoded = codec.decode(out)
    dense[indices] = decoded
    torch.testing.assert_close(dense[2:7], values, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("wire", [wire for wire in EXPLICIT if not wire.endswith("fp32")])
def test_sent_is_what_receivers_decode(wire: str) -> None:
    codec = resolve_codec(wire, 5000, 500, torch.float32)
    generator = torch.Generator().manual_seed(1)
    indices = torch.randperm(5000, generator=generator)[:500].sort().values
    values = torch.randn(500, generator=generator) * torch.logspace(-9, 9, 500)
    out = message(codec)
    sent = codec.encode(Selection(indices, values, 500), out)
    assert not torch.equal(sent, values)
    assert torch.equal(scattered(codec, *codec.decode(out)), scattered(codec, indices, sent))


@pytest.mark.parametrize(("value", "limit"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
@pytest.mark.parametrize("layout", ["block16", "dense"])
def test_sixteen_bits_saturate(layout: str, value: str, limit: float) -> None:
    codec = resolve_codec(f"{layout}-{value}", 4, 4, torch.float32)
    largest = torch.finfo(torch.float32).max
    sent = codec.encode(Selection(torch.arange(4), torch.tensor([largest, -largest, 1.0, 0.0]), 4), message(codec))
    assert sent.tolist() == [limit, -limit, 1.0, 0.0]


@pytest.mark.parametrize(("value", "roundoff"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
@pytest.mark.parametrize("layout", ["block16", "coo", "bitmap", "dense"])
def test_rounded_top_k_contracts(layout: str, value: str, roundoff: float) -> None:
    """Test T17: ||x - Q(T(x))||^2 <= (1 - (1 - u^2) k / d) ||x||^2 (rounding is orthogonal to what was not sent)."""
    d, k = 10_000, 100
    x = torch.randn(d, generator=torch.Generator().manual_seed(3))
    indices = x.abs().topk(k).indices.sort().values
    codec = resolve_codec(f"{layout}-{value}", d, k, torch.float32)
    out = message(codec)
    codec.encode(Selection(indices, x[indices], k), out)
    error = x.double() - scattered(codec, *codec.decode(out)).double()
    assert error.square().sum() <= (1 - (1 - roundoff**2) * k / d) * x.double().square().sum()
    rounding = error[indices].norm() / x[indices].double().norm()
    assert 0 < rounding <= roundoff


def test_sizes_follow_the_formulas() -> None:
    d, k = 1_000_000, 10_000
    for value, width in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        sizes = {
            layout: resolve_codec(f"{layout}-{value}", d, k, torch.float32).nbytes
            for layout in ("dense", "block16", "coo", "bitmap")
        }
        assert sizes == {
            "dense": width * d,
            "block16": 16 * 4 + (width + 2) * k,
            "coo": 4 + (width + 4) * k,
            "bitmap": d // 8 + width * k,
        }


@pytest.mark.parametrize(
    ("layout", "bits"),
    [
        ("eliasfano", {0.25: 4.0, 0.1: 5.25, 0.05: 6.25, 0.01: 8.56, 0.001: 11.97}),
        ("block16", {0.1: 16.005, 0.05: 16.010, 0.01: 16.049, 0.001: 16.488}),
        ("block8", {0.1: 8.625, 0.05: 9.25, 0.01: 14.25, 0.001: 70.5}),
        ("bitmap", {0.1: 10, 0.05: 20, 0.01: 100, 0.001: 1000}),
        ("coo", {0.1: 32, 0.05: 32, 0.01: 32, 0.001: 32}),
    ],
)
def test_position_bits_per_entry(layout: str, bits: dict[float, float]) -> None:
    """Bits of position per entry, computed independently."""
    for density, expected in bits.items():
        k = int((1 << 24) * density)
        codec = resolve_codec(f"{layout}-bf16", 1 << 24, k, torch.float32)
        assert 8 * codec.nbytes / k - 16 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("numel", [100_000, 131_073, 1_000_000, 25_000_000])
def test_block16_bf16_takes_four_bytes_per_entry(numel: int) -> None:
    capacity = numel // 100
    assert resolve_codec("bf16", numel, capacity, torch.float32).nbytes <= 4.1 * capacity


@pytest.mark.parametrize("wire", EXPLICIT)
@pytest.mark.parametrize("numel", [0, 1, 5, 65537])
def test_messages_keep_the_alignment(wire: str, numel: int) -> None:
    for capacity in range(min(numel, 5) + 1):
        assert resolve_codec(wire, numel, capacity, torch.float32).nbytes % 4 == 0


@pytest.mark.parametrize("wire", EXPLICIT)
def test_empty_spans(wire: str) -> None:
    codec = resolve_codec(wire, 0, 0, torch.float32)
    out = message(codec)
    codec.encode(Selection(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 0), out)
    assert [len(part) for part in codec.decode(out)] == [0, 0]
    assert [len(part) for part in codec.decode_padded(out)] == [0, 0]


@pytest.mark.parametrize(
    ("wire", "numel", "capacity", "dtype", "name"),
    [
        ("auto", 100_000, 1000, torch.float32, "eliasfano-fp32"),
        ("auto", 100_000, 1000, torch.float64, "eliasfano-fp32"),
        ("auto", 100_000, 1000, torch.bfloat16, "eliasfano-bf16"),
        ("auto", 100_000, 1000, torch.float16, "eliasfano-fp16"),
        ("fp16", 100_000, 1000, torch.bfloat16, "eliasfano-fp16"),
        ("bf16", 100_000, 30_000, torch.float32, "bitmap-bf16"),
        ("fp32", 100_000, 100_000, torch.float32, "dense-fp32"),
        ("fp32", 100_000_000, 1, torch.float32, "coo-fp32"),
        ("bitmap-fp32", 100_000, 1000, torch.bfloat16, "bitmap-fp32"),
    ],
)
def test_resolve_takes_the_smallest(wire: str, numel: int, capacity: int, dtype: torch.dtype, name: str) -> None:
    codec = resolve_codec(wire, numel, capacity, dtype)
    assert codec.name == name
    if "-" not in wire:
        values = name.rpartition("-")[2]
        others = [other for other in EXPLICIT if other.endswith(values) and not other.startswith("block8")]
        assert codec.nbytes == min(resolve_codec(other, numel, capacity, dtype).nbytes for other in others)


def test_every_available_wire_resolves() -> None:
    names = {resolve_codec(wire, 1000, 10, torch.float32).name for wire in available_wires()}
    assert names == {wire for wire in available_wires() if "-" in wire}


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"'zip'.*choose one of 'auto', 'fp32', 'bf16', 'fp16', 'q4', 'q2', 'sign', 'dense-fp32'"
    ):
        resolve_codec("zip", 10, 1, torch.float32)
    with pytest.raises(ValueError, match="between 0 and the 10 elements of the span, got 11"):
        resolve_codec("auto", 10, 11, torch.float32)
    codec = resolve_codec("auto", 10, 2, torch.float32)
    with pytest.raises(ValueError, match="3 entries, the message has room for 2"):
        codec.encode(draw(10, 3), message(codec))
    with pytest.raises(ValueError, match=r"uint8 \[12\], got torch.uint8 \[17\]"):
        codec.decode(torch.zeros(17, dtype=torch.uint8))


# --- a few bits ----------------------------------------------------------------------------------------------------

LAYOUTS = ("eliasfano", "block16", "block8", "coo", "bitmap")
FEW_BITS = [f"{layout}-{values}" for layout in LAYOUTS for values in QUANTIZED]


def noise(numel: int, count: int, seed: int = 0) -> Selection:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values
    return Selection(indices, torch.randn(count, generator=generator) * 10.0 ** -(indices % 3), count)


@pytest.mark.parametrize("wire", FEW_BITS)
@pytest.mark.parametrize(("numel", "count"), [(1, 1), (200, 127), (200, 128), (70_000, 129), (70_000, 5000)])
def test_few_bits_arrive_as_the_sender_says(wire: str, numel: int, count: int) -> None:
    for capacity in {count, min(numel, count + 300)}:
        codec = resolve_codec(wire, numel, capacity, torch.float32)
        selection = noise(numel, count)
        out = message(codec)
        sent = codec.encode(selection, out)
        indices, values = codec.decode(out)
        assert torch.equal(indices, selection.indices)
        assert torch.equal(values, sent)
        # as on an accelerator: the same bytes, and padding of zeros
        again = message(codec, garbage=7)
        padded = codec.encode(on_accelerator(selection, capacity), again)
        assert torch.equal(padded, torch.cat([sent, torch.zeros(capacity - count)]))
        indices, values = codec.decode_padded(again)
        assert torch.equal(values, padded)
        assert torch.equal(indices[:count], selection.indices)


@pytest.mark.parametrize("values", QUANTIZED)
@pytest.mark.parametrize("count", [1, 129, 5000])
def test_every_layout_decodes_the_same_numbers(values: str, count: int) -> None:
    edges, found = (0, 300, 300, 40_000, 70_000), []
    for layout in LAYOUTS:
        codec = resolve_codec(f"{layout}-{values}", edges[-1], count, torch.float32, edges)
        out = message(codec)
        codec.encode(noise(edges[-1], count), out)
        found.append(codec.decode(out))
    for indices, decoded in found[1:]:
        assert torch.equal(indices, found[0][0])
        assert torch.equal(decoded, found[0][1])


@pytest.mark.parametrize("values", QUANTIZED)
def test_few_bits_round_to_levels_of_their_part_of_a_tensor(values: str) -> None:
    levels = 2 ** (QUANTIZED[values] - 1)
    # 426 positions have about 128 entries; the second tensor is shorter than that, and a thousand times larger
    edges = (0, 426, 700, 800, 1000)
    codec = resolve_codec(f"coo-{values}", 1000, 300, torch.float32, edges)
    selection = noise(1000, 300)
    selection.values[(selection.indices >= 700) & (selection.indices < 800)] *= 1000
    sent = codec.encode(selection, message(codec))
    assert torch.equal(sent.sign(), selection.values.sign())
    for start, stop in pairwise(edges):
        inside = (selection.indices >= start) & (selection.indices < stop)
        part, rounded = selection.values[inside].abs(), sent[inside].abs()
        if levels == 1:
            torch.testing.assert_close(rounded, part.mean().expand_as(part), rtol=2**-8, atol=0)
        else:
            # to the middle of its level, and the scale to 8 bits
            assert float((rounded - part).abs().max()) <= float(part.max()) * (0.5 / levels + 2**-8)
            assert len(rounded.unique()) <= levels


@pytest.mark.parametrize("values", QUANTIZED)
@pytest.mark.parametrize(
    ("share", "layout", "bits"),
    [(2, "bitmap", 2), (16, "eliasfano", 6.06), (64, "eliasfano", 8.06), (512, "eliasfano", 11.13)],
)
def test_few_bits_need_few_bytes(values: str, share: int, layout: str, bits: float) -> None:
    count = (1 << 20) // share
    codec = resolve_codec(values, 1 << 20, count, torch.float32)
    assert codec.layout == layout
    assert 8 * codec.nbytes / count == pytest.approx(bits + QUANTIZED[values] + 16 / 128, abs=0.02)


@pytest.mark.parametrize("wire", FEW_BITS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_few_bits_do_not_hide_what_is_not_finite(wire: str, value: float) -> None:
    codec = resolve_codec(wire, 1000, 300, torch.float32)
    selection = noise(1000, 300)
    selection.values[299] = value
    out = message(codec)
    sent = codec.encode(selection, out)
    _, values = codec.decode(out)
    assert not values[299].isfinite()
    assert values[:100].isfinite().all()
    assert torch.equal(sent[:100], values[:100])


def test_zeros_in_few_bits_stay_zeros() -> None:
    for values in QUANTIZED:
        codec = resolve_codec(f"coo-{values}", 1000, 300, torch.float32)
        out = message(codec)
        codec.encode(Selection(torch.arange(200), torch.zeros(200), 200), out)
        assert not codec.decode(out)[1].any()
        assert codec.encode(Selection(torch.arange(0), torch.zeros(0), 0), out).numel() == 0
        assert codec.decode(out)[0].numel() == 0


def test_few_bits_have_no_dense_messages() -> None:
    with pytest.raises(ValueError, match="unknown wire format 'dense-q2'"):
        resolve_codec("dense-q2", 10, 10, torch.float32)
    assert resolve_codec("sign", 10_000, 10_000, torch.float32).layout == "bitmap"


# --- Elias and Fano ------------------------------------------------------------------------------------------------

TENSORS = (0, 1, 4097, 4097, 70_000, 70_003, 200_000)
ENTRIES = (0, 400, 0, 5000, 2, 9000)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("values", ["fp32", "fp16", "q4"])
def test_tensors_without_entries_have_no_buckets(values: str, compiled: bool) -> None:
    codec = resolve_codec(f"eliasfano-{values}", TENSORS[-1], sum(ENTRIES), torch.float32, TENSORS, ENTRIES)
    rng = np.random.default_rng(0)
    chosen = [rng.choice(b - a, n, replace=False) + a for (a, b), n in zip(pairwise(TENSORS), ENTRIES, strict=True)]
    indices = torch.from_numpy(np.sort(np.concatenate(chosen)))
    selection = Selection(indices, torch.randn(len(indices)), len(indices))
    out = message(codec)
    with contextlib.nullcontext() if compiled else native.unused():
        sent = codec.encode(selection, out)
        found, every = codec.decode(out)
        read = codec.reader(out)
        for start, stop in ((0, 1), (0, 2), (1, 4097), (4096, 4098), (69_999, 70_004), (199_999, 200_000), (7, 7)):
            some, of_some = read(start, stop)
            inside = (indices >= start) & (indices < stop)
            assert torch.equal(some, indices[inside])
            assert torch.equal(of_some, sent[inside])
    assert torch.equal(found, indices)
    assert torch.equal(every, sent)
    assert torch.equal(codec.decode_padded(out)[0], indices)
    fewer = (*ENTRIES[:-1], 0)
    sizes = [
        resolve_codec(f"eliasfano-{values}", TENSORS[-1], sum(fewer), torch.float32, TENSORS, entries).nbytes
        for entries in (fewer, None)
    ]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("field", ["ranks", "high", "low"])
def test_damage_is_found(field: str, compiled: bool) -> None:
    """Whatever bits are flipped: an error, or other entries in order; never an access outside."""
    codec = resolve_codec("eliasfano-q4", TENSORS[-1], sum(ENTRIES), torch.float32, TENSORS, ENTRIES)
    chosen = torch.randperm(69_999, generator=torch.Generator().manual_seed(0))[:14_000].sort().values + 1
    out = message(codec)
    codec.encode(Selection(chosen, torch.ones(len(chosen)), len(chosen)), out)
    place = ("ranks", "high", "low").index(field)
    begin, size = sum(codec.field_bytes[:place]), codec.field_bytes[place]
    rng = np.random.default_rng(1)
    refused: list[str] = []
    with contextlib.nullcontext() if compiled else native.unused():
        for _ in range(200):
            damaged = out.clone()
            for at in rng.integers(0, size, 3):
                damaged[begin + at] ^= int(rng.integers(1, 256))
            try:
                found, _ = codec.decode(damaged)
            except ValueError as error:
                refused.append(str(error))
            else:
                assert bool((found.diff() > 0).all())
                assert len(found) <= codec.capacity
    assert all("damaged" in each for each in refused)
    assert len(refused) > (10 if field == "low" else 150)


@pytest.mark.parametrize("indices", [[5, 4], [0, 9], [4097, 4097]])
def test_positions_that_cannot_be_written_are_refused(indices: list[int]) -> None:
    codec = resolve_codec("eliasfano-fp32", TENSORS[-1], sum(ENTRIES), torch.float32, TENSORS, ENTRIES)
    with pytest.raises(ValueError, match="do not ascend, or lie in tensors that have no quota"):
        codec.encode(Selection(torch.tensor(indices), torch.ones(2), 2), message(codec))
