"""The study of message formats."""

from __future__ import annotations

import pytest

from lab.formats import LAYOUTS, formats
from lightning_safusion.kernels import cpu as native


@pytest.mark.skipif(not native.usable(), reason="no compiled kernels")
def test_the_fewest_bits_are_those_of_elias_and_fano(capsys: pytest.CaptureFixture[str]) -> None:
    formats(densities=(0.05,), trace="lstm", repetitions=1)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == [f"`{layout}-q4`" for layout in LAYOUTS]
    bits = [float(row[2]) for row in rows]
    assert min(bits) == bits[-1] == pytest.approx(10.5, abs=0.2)
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in rows)
