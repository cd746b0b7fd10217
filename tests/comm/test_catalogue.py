"""A new collective is a class and a row; so is a new value format. Both train."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.catalogue import COLLECTIVES, Collective, find_collective
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.wire.formats import available_wires, resolve_codec, value_format
from lightning_safusion.comm.wire.values import VALUES, ValueField, Values, fill
from lightning_safusion.sparsify.base import Selection
from tests.cluster import Cluster, settings


def trained(collective: str, wire: str = "auto") -> tuple[list[list[Tensor]], float]:
    """Means of three windows, and the largest share of a gradient that was neither delivered nor kept."""
    cluster = Cluster(3, lambda: settings(collective=collective, density=0.05, wire=wire))
    total = [torch.zeros(spec.numel, dtype=torch.float64) for spec in cluster.specs]
    means = []
    for step in range(3):
        grads = cluster.random_grads(step)
        results = cluster.step(grads)
        for index in range(len(total)):
            assert all(torch.equal(results[0][index], other[index]) for other in results[1:])
            total[index] += sum(rank[index].double() for rank in grads) - 3 * results[0][index].double()
        means.append(results[0])
    kept = [sum(cluster.residual(rank, index) for rank in range(3)) for index in range(len(total))]
    scale = max(float(each.abs().max()) for each in kept if len(each))
    lost = max(float((a - b).abs().max()) / scale for a, b in zip(total, kept, strict=True) if len(a))
    cluster.close()
    return means, lost


class Reversed(SparseAllGather):
    """Adds the messages of the ranks from the last to the first."""

    few_bits = False

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        return None

    def decode(self, scratch: Tensor) -> Tensor:
        self._messages.reverse()
        mean = super().decode(scratch)
        self._messages.reverse()
        return mean


def test_a_new_collective_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Collective(Reversed, lambda buffer, over: Reversed(buffer.spec, over.main, buffer.device, buffer.codec))
    monkeypatch.setitem(COLLECTIVES, "reversed", row)
    means, lost = trained("reversed")
    assert lost < 1e-5
    for ours, theirs in zip(means, trained("allgather")[0], strict=True):
        for mean, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mean, other)
    # what it can do is read from its class
    assert row.stream_ordered
    assert row.conserves
    with pytest.raises(ValueError, match="wire='q4' rounds so much"):
        settings(collective="reversed", wire="q4")


def test_unknown_collective() -> None:
    with pytest.raises(ValueError, match=r"collective must be one of 'auto', .*, got 'algather'. Did you mean 'allg"):
        find_collective("algather")


@pytest.mark.parametrize(
    ("name", "few_bits", "stream_ordered", "selects_itself", "conserves"),
    [
        ("auto", True, True, False, True),
        ("allgather", True, True, False, True),
        ("hybrid", True, True, False, True),
        ("hierarchical", False, False, True, True),
        ("allreduce", False, True, False, True),
        ("oktopk", False, False, False, True),
        ("gtopk", False, False, False, False),
    ],
)
def test_what_each_can_do(
    name: str, few_bits: bool, stream_ordered: bool, selects_itself: bool, conserves: bool
) -> None:
    row = find_collective(name)
    found = row.few_bits, row.stream_ordered, row.selects_itself, row.conserves
    assert found == (few_bits, stream_ordered, selects_itself, conserves)


class Eighths(ValueField):
    """Multiples of 1/8, as int8; larger values are cut."""

    def __init__(self, capacity: int, edges: Sequence[int]) -> None:
        self.nbytes = -(-capacity // 4) * 4

    def write(self, indices: Tensor, values: Tensor, field: Tensor, echo: bool = True) -> Tensor:
        codes = (values * 8).round().clamp(-127, 127).to(torch.int8)
        fill(field.view(torch.int8), codes)
        return codes.float() / 8

    def read(self, indices: Tensor, field: Tensor, first: int = 0) -> Tensor:
        return field.view(torch.int8)[first : first + len(indices)].float() / 8


def test_a_new_value_format_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "eighths", Values("eighths", torch.float32, 8, Eighths))
    assert {"eighths", "block16-eighths", "coo-eighths"} <= set(available_wires())
    assert "dense-eighths" not in available_wires()
    assert value_format("block8-eighths").width == 8
    codec = resolve_codec("eighths", 1000, 3, torch.float32)
    out = torch.empty(codec.nbytes, dtype=torch.uint8)
    sent = codec.encode(Selection(torch.tensor([1, 500, 999]), torch.tensor([0.3, -1.0, 99.0]), 3), out)
    assert sent.tolist() == [0.25, -1.0, 15.875]
    assert [part.tolist() for part in codec.decode(out)] == [[1, 500, 999], [0.25, -1.0, 15.875]]
    _, lost = trained("allgather", "eighths")
    assert lost < 1e-5
    with pytest.raises(ValueError, match="wire='eighths' rounds so much"):
        settings(collective="oktopk", wire="eighths")


@pytest.mark.parametrize(("wire", "name", "width", "few_bits"), [
    ("auto", "fp32", 32, False), ("bf16", "bf16", 16, False), ("block16-fp16", "fp16", 16, False),
    ("q4", "q4", 4, True), ("bitmap-q2", "q2", 2, True), ("coo-sign", "sign", 1, True),
])  # fmt: skip
def test_what_each_format_of_values_is(wire: str, name: str, width: int, few_bits: bool) -> None:
    values = value_format(wire)
    assert (values.name, values.width, values.few_bits) == (name, width, few_bits)
    assert value_format("auto", torch.bfloat16).name == "bf16"
    with pytest.raises(ValueError, match="unknown wire format 'dense-q4'"):
        value_format("dense-q4")
