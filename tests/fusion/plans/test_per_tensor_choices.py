"""Choices per tensor: HiPress's cost model, Espresso's steps, SSFusion's selective sparsification and offloading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.plans.espresso import Option, Trial, choose_options
from lightning_safusion.fusion.plans.hipress import compresses
from lightning_safusion.fusion.plans.selective import choose_offloaded, choose_selective, size_cap

FREE = LinearCost(0.0, 0.0)
MIB = 2**20


def test_hipress_compares_the_best_numbers_of_parts() -> None:
    encode, decode = LinearCost(0.5, 0.0), LinearCost(0.25, 0.0)
    for per_element in (0.001, 0.01, 0.02, 4.0):
        server = LinearCost(1.0, per_element)
        raw = [2 + 2 * per_element * 100 / k for k in range(1, 5)]
        times = [2 + 2 * per_element * 0.01 * 100 / k + min(k + 1, 4) * 0.5 + min(3 + k, 6) * 0.25 for k in range(1, 5)]
        assert compresses(100, 4, 0.01, server, encode, decode) == (min(times) < min(raw))


def test_hipress_compresses_where_the_network_is_slow_and_the_gradient_large() -> None:
    slow, fast, encode = LinearCost(0.0, 1e-8), LinearCost(0.0, 1e-11), LinearCost(0.0, 1e-10)
    assert compresses(10**6, 8, 1 / 16, slow, encode, FREE)
    assert not compresses(10**6, 8, 1 / 16, fast, encode, FREE)
    assert not compresses(10, 8, 1 / 16, LinearCost(1e-5, 1e-8), LinearCost(1e-5, 1e-10), FREE)


def exchange_bound(numels: Sequence[int], last_idle: int = 0, host: float = 0.1) -> Callable[[Sequence[Option]], Trial]:
    """A job whose time is that of its bytes, plus 1.5 s for each selection, and ``host`` for each on the host."""
    seconds = {"full": 4.0 / MIB, "half": 2.0 / MIB, "sparse": 0.0, "sparse-cpu": 0.0}
    fixed = {"full": 0.0, "half": 0.0, "sparse": 1.5, "sparse-cpu": host}

    def simulate(options: Sequence[Option]) -> Trial:
        spent = sum(seconds[o] * n + fixed[o] for o, n in zip(options, numels, strict=True))
        return Trial(spent, last_idle)

    return simulate


def test_espresso_proposes_by_size_and_keeps_what_helps() -> None:
    numels = [1000, 2**18, 2**19 + 1, 4 * MIB]
    # compression would save the third 1.0 s and cost it 1.5 s
    assert choose_options(numels, exchange_bound(numels), cpu=False) == ["full", "half", "half", "sparse"]


def test_espresso_leaves_tensors_before_the_last_idle_moment_alone() -> None:
    numels = [4 * MIB] * 4
    options = choose_options(numels, exchange_bound(numels, last_idle=2), cpu=False)
    assert options == ["full", "full", "sparse", "sparse"]


def test_espresso_compresses_from_a_larger_size_over_pcie() -> None:
    numels = [2**20 - 1]
    assert choose_options(numels, exchange_bound(numels), "nvlink", cpu=False) == ["sparse"]
    assert choose_options(numels, exchange_bound(numels), "pcie", cpu=False) == ["half"]


def test_espresso_tries_the_largest_first_and_the_latest_of_equals() -> None:
    numels = [MIB, 4 * MIB, 4 * MIB, 2 * MIB]

    def once(options: Sequence[Option]) -> Trial:
        return Trial(abs(options.count("sparse") - 1.0), 0)

    assert choose_options(numels, once, cpu=False) == ["half", "half", "sparse", "half"]


def test_espresso_offloads_as_many_of_a_size_as_is_best() -> None:
    numels = [4 * MIB] * 3 + [40 * MIB]
    base = exchange_bound(numels)

    def crowded(options: Sequence[Option]) -> Trial:
        waiting = max(0, options.count("sparse-cpu") - 2)
        return Trial(base(options).seconds + 5.0 * waiting, 0)

    assert choose_options(numels, crowded) == ["sparse-cpu", "sparse-cpu", "sparse", "sparse"]


def test_size_cap_is_what_fits_into_the_budget() -> None:
    assert size_cap([64, 64, 256, 1024], 0.1) == 255
    assert size_cap([100], 0.5) == 99
    assert size_cap([8, 8, 8], 0.1) == 7


def test_ssfusion_pays_for_dense_tensors_with_the_density_of_the_others() -> None:
    numels = [64, 64, 256, 1024]
    choice = choose_selective(numels, 0.1, lambda choice: -sum(choice.dense))
    assert choice.dense == (True, True, False, False)
    kept = sum(n if dense else n * choice.density for n, dense in zip(numels, choice.dense, strict=True))
    assert kept == pytest.approx(0.1 * sum(numels))


def test_ssfusion_keeps_the_density_where_nothing_is_dense() -> None:
    choice = choose_selective([64, 64, 256, 1024], 0.1, lambda choice: sum(choice.dense))
    assert choice.dense == (False,) * 4
    assert choice.density == pytest.approx(0.1)


def test_ssfusion_offloads_while_the_host_is_free() -> None:
    # the host takes 2.5 s, so it is free again for the fourth tensor
    offloaded = choose_offloaded([1.0, 2.0, 3.0, 4.0, 9.0], [True] * 4 + [False], [0.0] * 5, [2.5] * 5)
    assert offloaded == [True, False, False, True, False]


def test_ssfusion_takes_the_last_tensor_back_if_the_host_would_delay_the_buffer() -> None:
    assert choose_offloaded([1.0, 2.0], [True, True], [0.5, 0.5], [0.5, 9.0]) == [True, False]
    # selection on the device delays the gradients after it
    assert choose_offloaded([1.0, 2.0, 3.0], [True] * 3, [0.0, 2.0, 0.0], [2.5] * 3) == [True, False, False]
