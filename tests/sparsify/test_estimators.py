"""What every sparsifier promises, whatever its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_safusion.sparsify.adtopk import ADTopk
from lightning_safusion.sparsify.base import Segments, Sparsifier, element_quota, span_segments
from lightning_safusion.sparsify.basic import NoCompression, RandomK, Threshold, TopK
from lightning_safusion.sparsify.dgc import DGC
from lightning_safusion.sparsify.gaussiank import GaussianK
from lightning_safusion.sparsify.oktopk import OkTopk
from lightning_safusion.sparsify.redsync import RedSync
from lightning_safusion.sparsify.registry import SPARSIFIERS
from lightning_safusion.sparsify.selection.select import ThresholdSparsifier, segmented_view
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.sidco import SIDCo
from lightning_safusion.testing import check_selected, check_sparsifier
from tests.sparsify.distributions import SAMPLERS, sample
from tests.sparsify.oracle import cut

ESTIMATORS: dict[str, Callable[[], ThresholdSparsifier]] = {
    "dgc": DGC,
    "gaussiank": GaussianK,
    "gaussiank-paper": lambda: GaussianK("paper"),
    "redsync": RedSync,
    "redsync-trim": lambda: RedSync("trim"),
    "sidco": SIDCo,
    "sidco-e": lambda: SIDCo("exponential", stages=2, correct=False),
    "sidco-gp": lambda: SIDCo("gamma_gpareto"),
    "sidco-adapt": lambda: SIDCo("exponential", stages=1, correct=False, adapt=True),
    "oktopk": lambda: OkTopk(refresh=8),
    "oktopk-step": lambda: OkTopk(refresh=8, control="step"),
}
ALL: dict[str, Callable[[], Sparsifier]] = {
    "topk": TopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "adtopk": ADTopk,
    "none": NoCompression,
    **ESTIMATORS,
}
BY_MAGNITUDE = [name for name in ALL if name != "randomk"]
# decided by the set of magnitudes alone, not by positions
BY_DISTRIBUTION = [name for name in BY_MAGNITUDE if name != "dgc"]

SIZES = (3_000, 1, 0, 17, 900, 40, 2_000)
QUOTAS = (30, 1, 0, 1, 0, 40, 500)


def several() -> tuple[Tensor, Segments]:
    """Seven segments: one empty, one left out, one whose quota is its size."""
    x = torch.cat([sample(name, size, seed=9) for name, size in zip(SAMPLERS, SIZES, strict=False)])
    return x, cut(SIZES, QUOTAS)


@pytest.mark.parametrize("name", SPARSIFIERS | ESTIMATORS)
def test_contract(name: str) -> None:
    """For any span, also with NaN and infinities, which training flags and resets before a selection sees them."""
    check_sparsifier((SPARSIFIERS | ESTIMATORS)[name], cases=40)


@pytest.mark.parametrize("name", ALL)
def test_contract_with_a_pool(name: str) -> None:
    x, _ = several()
    pool = cut(SIZES, np.minimum(QUOTAS, 5).tolist(), 200)
    counts = check_selected(ALL[name]().select(x, pool, 0), x, pool)
    assert counts[4] == 0  # quota 0: not even from the pool
    if name in ("topk", "adtopk"):
        assert counts.sum() == pool.capacity


@pytest.mark.parametrize("name", BY_MAGNITUDE)
def test_no_larger_element_stays_behind(name: str) -> None:
    """Threshold consistency, and with it the contraction ||x - C(x)||^2 <= (1 - N/d) ||x||^2."""
    for distribution, quota in (("gaussian", 20), ("student3", 1_000), ("uniform", 2_000), ("zeros_laplace", 1_000)):
        x = sample(distribution, 20_000)
        selection = ALL[name]().select(x, span_segments(20_000, quota), 0)
        left = x.clone()
        left[selection.indices] = 0
        assert float(selection.values.abs().min()) >= float(left.abs().max())


@pytest.mark.parametrize("name", [name for name in ALL if name != "threshold"])
def test_scaling_by_a_power_of_two_changes_nothing(name: str) -> None:
    x, segments = several()
    for factor in (2.0**-20, -(2.0**9)):
        plain, scaled = ALL[name](), ALL[name]()
        for step in range(2):
            one, other = plain.select(x, segments, step), scaled.select(x * factor, segments, step)
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.values * factor, other.values)


@pytest.mark.parametrize("name", BY_DISTRIBUTION)
def test_order_of_the_elements_does_not_matter(name: str) -> None:
    x = sample("laplace", 30_000)
    order = torch.from_numpy(np.random.default_rng(4).permutation(30_000))
    segments = span_segments(30_000, 300)
    plain = ALL[name]().select(x, segments, 0)
    permuted = ALL[name]().select(x[order], segments, 0)
    assert sorted(order[permuted.indices].tolist()) == plain.indices.tolist()


@pytest.mark.parametrize("name", ["sidco-adapt", "oktopk", "oktopk-step"])
def test_state_resumes_the_same_thresholds(name: str) -> None:
    segments = span_segments(20_000, 40)
    straight, resumed = ESTIMATORS[name](), ESTIMATORS[name]()
    for step in range(20):
        view = segmented_view(sample("student5", 20_000, seed=step), segments)
        tau = straight.thresholds(view, step)
        assert step < 7 or torch.equal(resumed.thresholds(view, step), tau)
        if step == 6:
            resumed.load_state_dict(straight.state_dict())
    resumed.load_state_dict({})
    assert resumed.state_dict() == {}


# -- edge inputs ----------------------------------------------------------------------------------------------------


# beside those of check_sparsifier
EDGES: dict[str, tuple[Tensor, int]] = {
    "constant": (torch.full((1_000,), 0.7), 10),
    "constant magnitude": (torch.where(torch.arange(1_000) % 3 == 0, -0.7, 0.7), 10),
    "one-hot": (torch.nn.functional.one_hot(torch.tensor(500), 1_000).float(), 10),
    "all NaN": (torch.full((1_000,), math.nan), 10),
    "all Inf": (torch.full((1_000,), math.inf), 10),
    "denormals": (sample("gaussian", 1_000) * 1e-41, 10),
    "huge": (sample("gaussian", 1_000) * 1e37, 10),
    "bfloat16 ties": (sample("gaussian", 1_000).bfloat16().float(), 10),
    "two values": (torch.where(torch.arange(1_000) % 2 == 0, 1.0, 1e-3), 10),
}


@pytest.mark.parametrize("name", ALL)
def test_edge_inputs(name: str) -> None:
    """Every input ends in a valid selection, also when the same input comes again and again."""
    for edge, (x, quota) in EDGES.items():
        segments = span_segments(x.numel(), quota)
        sparsifier = ALL[name]()
        for step in range(3):
            selection = sparsifier.select(x, segments, step)
            check_selected(selection, x, segments)
            if name != "randomk" and bool(torch.isfinite(x).all()) and bool(x.any()):
                assert float(selection.values.abs().max()) == float(x.abs().max()), edge  # it is always sent


@pytest.mark.parametrize("name", ["dgc", "gaussiank", "redsync", "redsync-trim", "sidco", "oktopk", "sidco-gp"])
def test_degenerate_inputs_do_not_starve(name: str) -> None:
    """The default methods send a good part of the quota where the fitted distribution makes no sense."""
    for edge in ("constant", "constant magnitude", "two values", "denormals", "bfloat16 ties"):
        x, quota = EDGES[edge]
        selection = ALL[name]().select(x, span_segments(x.numel(), quota), 0)
        assert int(selection.count) >= quota // 2, edge


@pytest.mark.parametrize("name", ALL)
def test_nothing_to_select(name: str) -> None:
    for x, segments in [
        (torch.zeros(0), Segments(np.array([0]), np.zeros(0, np.int64), (), ())),
        (torch.zeros(0), span_segments(0, 0)),
        (torch.ones(5), span_segments(5, 0)),
    ]:
        selection = ALL[name]().select(x, segments, 0)
        if name != "none":
            assert int(selection.count) == 0


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Threshold, {"value": -0.1}, "-0.1"),
        (Threshold, {"value": math.nan}, "nan"),
        (Threshold, {"value": math.inf}, "inf"),
        (ADTopk, {"rule": "columns"}, "columns"),
        (ADTopk, {"refresh": 5}, "refresh=5 is about Top-k, which only interleave=True"),
        (ADTopk, {"interleave": True, "refresh": 0}, "refresh must be at least 1 step, got 0"),
        (DGC, {"sample_ratio": 0.0}, "sample_ratio"),
        (DGC, {"sample_ratio": 1.5}, "1.5"),
        (DGC, {"tail_samples": 0}, "tail_samples"),
        (DGC, {"lower": 1.0}, "lower"),
        (DGC, {"max_iterations": -1}, "max_iterations"),
        (GaussianK, {"refine": "newton"}, "newton"),
        (GaussianK, {"max_refine": 0}, "0"),
        (OkTopk, {"refresh": 0}, "refresh"),
        (OkTopk, {"control": "pid"}, "pid"),
        (RedSync, {"method": "grid"}, "grid"),
        (RedSync, {"tolerance": 0.0}, "tolerance"),
        (RedSync, {"trim_step": 1.2}, "trim_step"),
        (SIDCo, {"fit": "weibull"}, "weibull"),
        (SIDCo, {"stages": 0}, "stages"),
        (SIDCo, {"first_ratio": 1.0}, "first_ratio"),
        (SIDCo, {"adapt_every": 0}, "adapt_every"),
        (SIDCo, {"adapt_tolerance": 0.0}, "adapt_tolerance"),
    ],
)
def test_arguments_are_checked(kind: type[Sparsifier], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


# -- backends and samplers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_formulas_agree_on_both_backends(name: str) -> None:
    """The accelerator's backend, here on a CPU tensor, leads to the same thresholds up to the order of the sums."""
    x, segments = several()
    live = torch.from_numpy(segments.quotas > 0)
    for step in range(2):
        numpy_tau = ESTIMATORS[name]().thresholds(segmented_view(x, segments), step)
        torch_tau = ESTIMATORS[name]().thresholds(TorchView(x, segments), step)
        assert torch_tau.dtype == numpy_tau.dtype == torch.float32
        assert torch.allclose(torch_tau[live], numpy_tau[live], rtol=1e-5, atol=1e-7)


class NoWaiting(TorchDispatchMode):
    """Refuses the operations for which the host waits for an accelerator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class Accelerated(TorchView):
    """A view whose results the host must not read, as on an accelerator."""

    readable = False


@pytest.mark.parametrize("name", ESTIMATORS)
def test_formulas_never_wait_for_the_device(name: str) -> None:
    """Without the early ends of the CPU the loops run on, settled segments stay as they are, nothing is read back."""
    x, segments = several()
    live = torch.from_numpy(segments.quotas > 0)
    waiting, sparsifier = ESTIMATORS[name](), ESTIMATORS[name]()
    for step in range(2):
        expected = waiting.thresholds(TorchView(x, segments), step)
        with NoWaiting():
            found = sparsifier.thresholds(Accelerated(x, segments), step)
        assert torch.equal(found[live], expected[live])


# -- defects of published implementations -----------------------------------------------------------------------------


def test_dgc_with_a_threshold_of_zero_sends_the_whole_tensor() -> None:
    """GRACE compares with >=: more than 1 - density zeros give the threshold 0, and everything is sent."""
    x = torch.zeros(10_000)
    x[::500] = torch.arange(1.0, 21.0)
    tau = DGC().thresholds(segmented_view(x, span_segments(10_000, 100)), 0)
    assert float(tau) == 0
    assert DGC().select(x, span_segments(10_000, 100), 0).indices.tolist() == list(range(0, 10_000, 500))


@pytest.mark.parametrize("kind", [DGC, GaussianK, RedSync, SIDCo, OkTopk, ADTopk])
def test_density_is_hard_coded_in_the_compressor(kind: type[Sparsifier]) -> None:
    """ADTopk's ports use 0.01 (0.05 for top-k) whatever is asked for."""
    for density in (0.3, 0.05, 0.002):
        quota = int(density * 40_000)
        count = int(kind().select(sample("laplace", 40_000), span_segments(40_000, quota), 0).count)
        assert 0.6 * quota <= count <= quota


def test_indices_travel_through_float32() -> None:
    """OkTopk: positions beyond 2^24 lose their last bits."""
    x = torch.zeros((1 << 24) + 10)
    wanted = [(1 << 24) + 1, (1 << 24) + 3, (1 << 24) + 7]
    x[wanted] = 1.0
    selection = OkTopk().select(x, span_segments(x.numel(), 3), 0)
    assert selection.indices.tolist() == wanted


def test_quota_loses_an_element_to_the_float_product() -> None:
    """int(100 * 0.29) is 28, ceil(100 * 0.07) is 8."""
    assert element_quota(100, 0.29) == 29
    assert element_quota(100, 0.07) == 7
    assert ADTopk().quota(1_000, (10, 100), 0.29) == 290
