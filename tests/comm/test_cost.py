from __future__ import annotations

import numpy as np
import pytest

from lightning_safusion.comm.cost import LINKS, LinearCost, Link, allgather_bytes, fit_linear, ring_allreduce_bytes

SIZES = [2.0**p for p in range(12, 21)]


def test_volumes() -> None:
    assert ring_allreduce_bytes(4, 1000) == 1500
    assert ring_allreduce_bytes(1, 1000) == 0
    assert allgather_bytes(4, 1000) == 3000
    assert allgather_bytes(1, 1000) == 0


def test_times() -> None:
    link = Link(alpha=1e-3, beta=1e-6, launch=1e-2)
    assert link.allreduce(4)(1000) == pytest.approx(1e-2 + 6e-3 + 1.5e-3)
    assert link.allreduce(4, "tree")(1000) == pytest.approx(1e-2 + 4e-3 + 1.5e-3)
    assert link.allgather(5)(1000) == pytest.approx(1e-2 + 4e-3 + 4e-3)
    assert link.allgather(5, "doubling")(1000) == pytest.approx(1e-2 + 3e-3 + 4e-3)
    assert link.allgather(1) == link.allreduce(1) == LinearCost(1e-2, 0.0)


def test_presets_are_ordered_by_bandwidth() -> None:
    betas = [link.beta for link in LINKS.values()]
    assert betas == sorted(betas, reverse=True)
    assert LINKS["10gbit"].beta == pytest.approx(1 / (1.25e9 * 0.85))
    with pytest.raises(TypeError):
        LINKS["mine"] = Link(0, 0)  # type: ignore[index]  # what is refused


@pytest.mark.parametrize(
    ("fixed", "per_byte"), [(5.2e-4, 0.86e-9), (7.04e-3, 0.96e-9), (1.6e-3, 1e-8), (0.0, 1e-9), (1e-4, 0.0)]
)
def test_fit_recovers_a_line(fixed: float, per_byte: float) -> None:
    cost = fit_linear([(size, fixed + per_byte * size) for size in SIZES])
    assert cost.fixed == pytest.approx(fixed, rel=1e-6, abs=1e-10)
    assert cost.per_byte == pytest.approx(per_byte, rel=1e-6, abs=1e-15)


def test_fit_shrugs_off_disturbed_measurements() -> None:
    rng = np.random.default_rng(0)
    samples = [(size, (1e-4 + 1e-9 * size) * (1 + 0.02 * rng.standard_normal())) for size in SIZES for _ in range(5)]
    for place in (3, 17, 30, 40):  # a stalled process
        size, seconds = samples[place]
        samples[place] = (size, 50 * seconds)
    cost = fit_linear(samples)
    assert cost.fixed == pytest.approx(1e-4, rel=0.05)
    assert cost.per_byte == pytest.approx(1e-9, rel=0.05)


def test_fit_has_no_negative_coefficient() -> None:
    falling = fit_linear([(1000, 2e-3), (2000, 1e-3), (4000, 0.9e-3)])
    assert falling.per_byte == 0
    assert falling.fixed > 0
    steep = fit_linear([(1000, 1e-3), (2000, 4e-3), (4000, 12e-3)])
    assert steep.fixed == 0
    assert 1e-6 < steep.per_byte < 3e-6


def test_fit_of_one_size_is_a_constant() -> None:
    cost = fit_linear([(4096, 1e-3), (4096, 1e-3)])
    assert cost.fixed == pytest.approx(1e-3)
    assert cost.per_byte == 0


def test_fit_of_zeros() -> None:
    assert fit_linear([(1.0, 0.0), (2.0, 0.0)]) == LinearCost(0.0, 0.0)


@pytest.mark.parametrize("sample", [(float("nan"), 1.0), (1.0, float("inf")), (-1.0, 1.0), (1.0, -1.0)])
def test_fit_refuses_nonsense(sample: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        fit_linear([(1.0, 1.0), sample])


def test_fit_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit_linear([])
