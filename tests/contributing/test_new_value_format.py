"""A new value format is a class and a row of values.py: the recipe of docs/contributing.md, in a job of three."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.wire.formats import available_wires, resolve_codec, value_format
from lightning_safusion.comm.wire.values import VALUES, ValueField, Values, fill
from lightning_safusion.sparsify.base import Selection
from tests.cluster import settings
from tests.contributing.jobs import exchanged


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


ROW = {"eighths": Values("eighths", torch.float32, 8, Eighths)}


def test_it_is_written_read_and_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "eighths", ROW["eighths"])
    assert {"eighths", "eliasfano-eighths", "coo-eighths"} <= set(available_wires())
    assert value_format("bitmap-eighths").width == 8
    codec = resolve_codec("eighths", 1000, 3, torch.float32)
    out = torch.empty(codec.nbytes, dtype=torch.uint8)
    sent = codec.encode(Selection(torch.tensor([1, 500, 999]), torch.tensor([0.3, -1.0, 99.0]), 3), out)
    assert sent.tolist() == [0.25, -1.0, 15.875]
    assert [part.tolist() for part in codec.decode(out)] == [[1, 500, 999], [0.25, -1.0, 15.875]]
    _, lost = exchanged("allgather", "eighths")
    assert lost < 1e-5
    with pytest.raises(ValueError, match="wire='eighths' rounds so much"):
        settings(collective="oktopk", wire="eighths")
