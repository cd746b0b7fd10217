"""Wire formats on inputs that are chosen; `test_message_properties.py` has those that Hypothesis makes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import available_wires, resolve_codec
from lightning_safusion.sparsify.base import Selection
from tests.sparsify.oracle import KERNELS, kernels

QUANTIZED = {"q4": 4, "q2": 2, "sign": 1}
LAYOUTS = ("eliasfano", "coo", "bitmap")
EXPLICIT = [wire for wire in available_wires() if "-" in wire and wire.rpartition("-")[2] not in QUANTIZED]


def message(codec: Codec) -> Tensor:
    return torch.full((codec.nbytes,), 255, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("numel", "indices"),
    [
        (200_000, [0, 65535, 65536, 131071, 196607, 196608, 199_999]),
        # T16: float32 could not hold these positions
        (2**24 + 70_001, [2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, 2**24 + 70_000]),
        (2**31 + 100_000, [5, 2**31 - 1, 2**31, 2**31 + 99_999]),
    ],
)
def test_positions_at_the_edges(numel: int, indices: list[int]) -> None:
    expected = torch.tensor(indices)
    for layout in LAYOUTS if numel < 2**31 else ("eliasfano",):
        codec = resolve_codec(f"{layout}-bf16", numel, len(indices) + 2, torch.float32)
        out = message(codec)
        codec.encode(Selection(expected, torch.arange(1.0, len(indices) + 1), len(indices)), out)
        for decoded, values in (codec.decode(out), codec.decode_padded(out)):
            assert decoded[: len(indices)].tolist() == indices
            assert values[: len(indices)].tolist() == list(range(1, len(indices) + 1))


def test_coo_refuses_long_spans() -> None:
    with pytest.raises(ValueError, match=r"2147483648 elements.*use eliasfano"):
        resolve_codec("coo-fp32", 2**31, 10, torch.float32)
    assert resolve_codec("coo-fp32", 2**31 - 1, 10, torch.float32).nbytes == 84
    assert resolve_codec("fp32", 2**40, 10, torch.float32).name == "eliasfano-fp32"


@pytest.mark.parametrize(("value", "limit"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
@pytest.mark.parametrize("layout", ["eliasfano", "bitmap"])
def test_sixteen_bits_saturate(layout: str, value: str, limit: float) -> None:
    codec = resolve_codec(f"{layout}-{value}", 4, 4, torch.float32)
    largest = torch.finfo(torch.float32).max
    sent = codec.encode(Selection(torch.arange(4), torch.tensor([largest, -largest, 1.0, 0.0]), 4), message(codec))
    assert sent.tolist() == [limit, -limit, 1.0, 0.0]


@pytest.mark.parametrize(("value", "roundoff"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_rounded_top_k_contracts(value: str, roundoff: float) -> None:
    """Test T17: ||x - Q(T(x))||^2 <= (1 - (1 - u^2) k / d) ||x||^2 (rounding is orthogonal to what was not sent)."""
    d, k = 10_000, 100
    x = torch.randn(d, generator=torch.Generator().manual_seed(3))
    indices = x.abs().topk(k).indices.sort().values
    codec = resolve_codec(value, d, k, torch.float32)
    sent = codec.encode(Selection(indices, x[indices], k), message(codec))
    error = x.double().index_add(0, indices, sent.double(), alpha=-1)
    assert error.square().sum() <= (1 - (1 - roundoff**2) * k / d) * x.double().square().sum()
    rounding = error[indices].norm() / x[indices].double().norm()
    assert 0 < rounding <= roundoff


def test_sizes_follow_the_formulas() -> None:
    d, k = 1_000_000, 10_000
    for value, width in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        sizes = [resolve_codec(f"{layout}-{value}", d, k, torch.float32).nbytes for layout in ("coo", "bitmap")]
        assert sizes == [4 + (width + 4) * k, d // 8 + width * k]


def test_bits_of_a_position_by_elias_and_fano() -> None:
    """Computed independently."""
    for density, expected in {0.25: 4.0, 0.1: 5.25, 0.05: 6.25, 0.01: 8.56, 0.001: 11.97}.items():
        k = int((1 << 24) * density)
        codec = resolve_codec("eliasfano-bf16", 1 << 24, k, torch.float32)
        assert 8 * codec.nbytes / k - 16 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("wire", "numel", "capacity", "dtype", "name"),
    [
        ("auto", 100_000, 1000, torch.float32, "eliasfano-fp32"),
        ("auto", 100_000, 1000, torch.float64, "eliasfano-fp32"),
        ("auto", 100_000, 1000, torch.bfloat16, "eliasfano-bf16"),
        ("auto", 100_000, 1000, torch.float16, "eliasfano-fp16"),
        ("fp16", 100_000, 1000, torch.bfloat16, "eliasfano-fp16"),
        ("bf16", 100_000, 30_000, torch.float32, "eliasfano-bf16"),
        ("q4", 100_000, 35_000, torch.float32, "eliasfano-q4"),
        ("q4", 100_000, 65_000, torch.float32, "bitmap-q4"),
        ("bf16", 100_000, 100_000, torch.float32, "bitmap-bf16"),
        ("fp32", 100_000_000, 1, torch.float32, "coo-fp32"),
        ("bitmap-fp32", 100_000, 1000, torch.bfloat16, "bitmap-fp32"),
    ],
)
def test_resolve_takes_about_the_smallest(wire: str, numel: int, capacity: int, dtype: torch.dtype, name: str) -> None:
    codec = resolve_codec(wire, numel, capacity, dtype)
    assert codec.name == name
    if "-" not in wire:
        values = name.rpartition("-")[2]
        others = [other for other in available_wires() if other.endswith(f"-{values}")]
        least = min(resolve_codec(other, numel, capacity, dtype).nbytes for other in others)
        assert least <= codec.nbytes <= least * (9 / 8 if wire == "q4" else 25 / 24)


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"'zip'.*Choose one of 'auto', 'fp32', 'bf16', 'fp16', 'q4', 'q2', 'sign', 'eliasfano-fp32'"
    ):
        resolve_codec("zip", 10, 1, torch.float32)
    for gone, better in (
        ("block16-bf16", "eliasfano-bf16"),
        ("block8-q4", "eliasfano-q4"),
        ("dense-fp32", "bitmap-fp32"),
    ):
        with pytest.raises(ValueError, match=f"wire='{gone}' is no more: use '{better}', or '{gone.split('-')[1]}'"):
            resolve_codec(gone, 10, 1, torch.float32)
    with pytest.raises(ValueError, match="unknown wire format 'list-q4'"):
        resolve_codec("list-q4", 10, 1, torch.float32)
    with pytest.raises(ValueError, match="between 0 and the 10 elements of the span, got 11"):
        resolve_codec("auto", 10, 11, torch.float32)
    codec = resolve_codec("auto", 10, 2, torch.float32)
    with pytest.raises(ValueError, match="3 entries, the message has room for 2"):
        codec.encode(Selection(torch.arange(3), torch.ones(3), 3), message(codec))
    with pytest.raises(ValueError, match=r"uint8 \[12\], got torch.uint8 \[17\]"):
        codec.decode(torch.zeros(17, dtype=torch.uint8))


# --- a few bits ----------------------------------------------------------------------------------------------------


def noise(numel: int, count: int, seed: int = 0) -> Selection:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values
    return Selection(indices, torch.randn(count, generator=generator) * 10.0 ** -(indices % 3), count)


@pytest.mark.parametrize("values", QUANTIZED)
def test_few_bits_need_few_bytes(values: str) -> None:
    for share, layout, bits in ((2, "bitmap", 2), (16, "eliasfano", 6.06), (512, "eliasfano", 11.13)):
        count = (1 << 20) // share
        codec = resolve_codec(values, 1 << 20, count, torch.float32)
        assert codec.layout == layout
        assert 8 * codec.nbytes / count == pytest.approx(bits + QUANTIZED[values] + 16 / 128, abs=0.02)


@pytest.mark.parametrize("values", QUANTIZED)
def test_few_bits_do_not_hide_what_is_not_finite(values: str) -> None:
    codec, out = resolve_codec(f"coo-{values}", 1000, 300, torch.float32), noise(1000, 300)
    for value in (float("nan"), float("inf"), float("-inf")):
        out.values[299] = value
        sent = codec.encode(out, message(codec))
        assert not sent[299].isfinite()
        assert sent[:100].isfinite().all()


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
        elif levels == 8:  # to the nearest power of two, up to a 128th of the largest, and the scale to 8 bits
            assert len((rounded / rounded.max()).log2().unique()) <= levels
            ratio = rounded / part.clamp(min=float(part.max()) / 128)
            assert 1 / 1.51 < float(ratio.min()) <= float(ratio.max()) < 1.51
        else:
            # to the middle of its level, and the scale to 8 bits
            assert float((rounded - part).abs().max()) <= float(part.max()) * (0.5 / levels + 2**-8)
            assert len(rounded.unique()) <= levels


def test_zeros_in_few_bits_stay_zeros() -> None:
    for values in QUANTIZED:
        codec = resolve_codec(f"coo-{values}", 1000, 300, torch.float32)
        out = message(codec)
        codec.encode(Selection(torch.arange(200), torch.zeros(200), 200), out)
        assert not codec.decode(out)[1].any()
        assert codec.encode(Selection(torch.arange(0), torch.zeros(0), 0), out).numel() == 0
        assert codec.decode(out)[0].numel() == 0


# --- Elias and Fano ------------------------------------------------------------------------------------------------

TENSORS = (0, 1, 4097, 4097, 70_000, 70_003, 200_000)
ENTRIES = (0, 400, 0, 5000, 2, 9000)


def test_tensors_without_entries_have_no_buckets() -> None:
    shape = "eliasfano-q4", TENSORS[-1], sum(ENTRIES[:-1]), torch.float32, TENSORS
    assert resolve_codec(*shape, (*ENTRIES[:-1], 0)).nbytes < resolve_codec(*shape).nbytes


@pytest.mark.parametrize("compiled", KERNELS)
def test_entries_that_a_message_has_no_place_for_are_refused(compiled: bool) -> None:
    full = resolve_codec("eliasfano-fp32", 1000, 10, torch.float32)
    out = message(full)
    full.encode(Selection(torch.arange(0, 1000, 100), torch.ones(10), 10), out)
    ranks, high, low = (field.numpy() for field in out.split(full.field_bytes[:3] + (sum(full.field_bytes[3:]),))[:3])
    with kernels(compiled):
        # one more in the last bucket: nothing else is wrong
        last = int(np.flatnonzero(np.unpackbits(high, bitorder="little"))[-1])
        ranks.view(np.uint16)[1] += 1
        high[last + 1 >> 3] |= 1 << (last + 1 & 7)
        low[:] = 255
        with pytest.raises(ValueError, match="11 entries has room for 10: it is damaged"):
            full.decode(out)
        # the last bucket of a tensor goes on behind its end
        codec = resolve_codec("eliasfano-fp32", 200_000, 1, torch.float32, (0, 100_005, 200_000), (1, 0))
        out = message(codec)
        codec.encode(Selection(torch.tensor([100_004]), torch.ones(1), 1), out)
        out[sum(codec.field_bytes[:2])] = 255
        with pytest.raises(ValueError, match="has entries between its tensors: it is damaged"):
            codec.decode(out)


@pytest.mark.parametrize("indices", [[5, 4], [0, 9], [4097, 4097]])
def test_positions_that_cannot_be_written_are_refused(indices: list[int]) -> None:
    codec = resolve_codec("eliasfano-fp32", TENSORS[-1], sum(ENTRIES), torch.float32, TENSORS, ENTRIES)
    with pytest.raises(ValueError, match="do not ascend, or lie in tensors that have no quota"):
        codec.encode(Selection(torch.tensor(indices), torch.ones(2), 2), message(codec))
