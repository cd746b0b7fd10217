"""ConvergenceProbe: figures computed by hand in real trainings on two ranks, and by brute force on virtual workers."""

from __future__ import annotations

import csv
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lab.probe import ConvergenceFigures, ConvergenceProbe, by_index, convergence_figures
from lightning_safusion import SAFusionStrategy, SIDCo
from tests.cluster import Cluster, settings, specs
from tests.models import TakeTurns, TinyClassifier, equal, fit
from tests.process_group import run_launched

# the gradients of ranks 0 and 1, in every step
GRADIENTS = (
    ((4.0, 3.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)),
    ((0.0, 3.0, 2.0, 0.0), (0.0, 0.0, 0.0, 1.0)),
)
# Top-k sends (4, 3) and (3, 2) in both steps; in the second the 1s have become 2s
CONTRACTIONS = (2 / 40, 8 / 46)
XI = 1 / sqrt(2**2 + 3**2 + 1 + 0.5**2 + 0.5**2)  # only the 2 of rank 1 is not among the largest of the mean


class Linear(LightningModule):
    """Its gradients do not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight * torch.tensor(GRADIENTS[self.global_rank])).sum() + self.bias.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


def strategy(system: str = "saf-inter", **options: Any) -> SAFusionStrategy:
    return SAFusionStrategy(system=system, **({"density": 0.25, "compressor": "topk"} | options))


@pytest.mark.parametrize("system", ["saf-inter", "behind"])
def test_figures_are_those_computed_by_hand(system: str, tmp_path: Path) -> None:
    def each(rank: int) -> dict[str, float]:
        probe = ConvergenceProbe(every_n_steps=1)
        chosen = strategy(system, dense=["bias"])
        options = {"callbacks": [probe], "logger": CSVLogger(tmp_path, version=0), "limit_train_batches": 2}
        fit(chosen, Linear(), default_root_dir=tmp_path, **options)
        return probe.latest.values()

    first, second = run_launched(2, each)
    assert first == second
    with open(next(tmp_path.rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for row, contraction in zip(rows, CONTRACTIONS, strict=True):
        logged = {key: float(value) for key, value in row.items() if key.startswith("safusion/")}
        expected = {"contraction": contraction, "xi": XI, "coverage": 0.5}
        named = {f"{key}/weight": value for key, value in expected.items()}  # the bias was dense
        assert logged == pytest.approx({f"safusion/{key}": value for key, value in (expected | named).items()})


def step(cluster: Cluster, grads: list[list[Tensor]]) -> tuple[list[ConvergenceFigures], list[list[Tensor]]]:
    """Figures of one window by rank, and what the gradients became."""

    def held(rank: int) -> dict[int, Tensor]:
        space = cluster.engines[rank].space
        return by_index(space.accumulated(), space.layout)

    before, delivered = cluster.each(held), cluster.step(grads)
    return cluster.each(lambda rank: convergence_figures(cluster.engines[rank].record, before[rank])), delivered


def norm2(flat: Tensor) -> float:
    return float(flat.double().square().sum())


OPTIONS: list[dict[str, Any]] = [
    {"collective": "allgather"},
    {"collective": "allgather", "scope": "group"},
    {"collective": "allgather", "quota": "pooled"},
    {"collective": "allgather", "memory": "none"},
    {"collective": "allgather", "compressor": "adtopk"},
    {"collective": "gtopk", "scope": "group", "fusion": "single"},
    {"collective": "oktopk", "scope": "group", "fusion": "single", "compressor": "oktopk"},
    {"collective": "allgather", "fusion": "naive"},
    {"collective": "hybrid", "fusion": "selective", "offload": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_figures_are_those_of_vectors_of_all_elements(options: dict[str, Any]) -> None:
    cluster = Cluster(3, lambda: settings(**options), specs(dense=[1]))
    for seed in range(4):
        grads = cluster.random_grads(seed)
        residuals = [[cluster.residual(rank, spec.index) for spec in cluster.specs] for rank in range(3)]
        figures, delivered = step(cluster, grads)
        total = ConvergenceFigures(figures[0].names, torch.stack([each.sums for each in figures]).sum(0))
        values = total.values()
        for spec in cluster.specs:
            if spec.index == 1 or spec.numel < 2:  # dense
                assert f"contraction/{spec.name}" not in values
                continue
            forgets = options.get("memory") == "none"
            xs = [g[spec.index] + (0 if forgets else h[spec.index]) for g, h in zip(grads, residuals, strict=True)]
            left = [cluster.residual(rank, spec.index) for rank in range(3)]
            mean = torch.stack([g[spec.index] for g in grads]).mean(0)
            assert total.sums[0, spec.index] == pytest.approx(sum(map(norm2, xs)), rel=1e-5)
            assert total.sums[2, spec.index] == pytest.approx(3 * norm2(mean), rel=1e-5)
            if not forgets:
                assert total.sums[1, spec.index] == pytest.approx(sum(map(norm2, left)), rel=1e-5)
            if options == {"collective": "allgather"}:
                expected = torch.stack(xs).mean(0)
                kept = expected.abs().topk(max(1, spec.numel // 20)).indices
                gap = torch.zeros_like(expected).index_copy_(0, kept, expected[kept]) - delivered[0][spec.index]
                assert total.sums[3, spec.index] == pytest.approx(3 * norm2(gap), rel=1e-4, abs=1e-9)
        assert values["contraction"] < 1
        if options.get("compressor") != "oktopk":  # whose thresholds are each rank's own
            assert all(torch.equal(each.sums[2:4], figures[0].sums[2:4]) for each in figures)
    cluster.close()


def test_everything_sent_has_no_distance_and_one_per_row_covers_all() -> None:
    def figures(**options: Any) -> dict[str, float]:
        cluster = Cluster(2, lambda: settings(collective="allgather", **options), specs([(40, 30), (64, 9, 3)]))
        each, _ = step(cluster, cluster.random_grads(0))
        cluster.close()
        return each[0].values()

    # all elements but one: compression of the mean leaves out almost nothing
    assert figures(density=0.9995)["xi"] < 1e-2 < figures(density=0.1)["xi"]
    by_row, by_size = figures(compressor="adtopk", density=0.001), figures(compressor="topk", density=0.001)
    assert by_row["coverage"] == 1 > by_size["coverage"]
    assert by_row["contraction/t0"] <= 1 - 1 / 30


def test_random_positions_that_all_ranks_share_have_no_distance() -> None:
    cluster = Cluster(3, lambda: settings("randomk", collective="allgather"))
    assert step(cluster, cluster.random_grads(0))[0][0].values()["xi"] < 1e-6
    cluster.close()


def test_probing_changes_nothing() -> None:
    def train(probed: bool) -> tuple[Any, Any]:
        compressor = SIDCo(adapt=True, adapt_every=2)
        cluster = Cluster(2, lambda: settings(compressor, collective="allgather"))
        means: list[Tensor] = []
        for seed in range(6):
            grads = cluster.random_grads(seed)
            means += step(cluster, grads)[1][0] if probed else cluster.step(grads)[0]
        cluster.close()
        return means, cluster.engines[0].space.selector.sparsifier.state_dict()

    (plain, state), (probed, probed_state) = train(False), train(True)
    assert equal(plain, probed)
    assert state["keys"] == probed_state["keys"]
    assert torch.equal(state["stages"], probed_state["stages"])


def test_a_momentum_has_no_gradient_to_compare_with() -> None:
    cluster = Cluster(2, lambda: settings(memory="dgc", collective="allgather"))
    values = step(cluster, cluster.random_grads(0))[0][0].values()
    assert {"contraction", "coverage"} <= values.keys()
    assert not any(key.startswith("xi") for key in values)
    cluster.close()


def test_a_window_with_a_bad_number_is_left_out_on_all_ranks() -> None:
    cluster = Cluster(2, lambda: settings(collective="allgather"))
    grads = cluster.random_grads(0)
    grads[1][0][3] = float("nan")
    assert [figures.values() for figures in step(cluster, grads)[0]] == [{}, {}]
    cluster.close()


def test_windows_of_all_optimizers_and_of_accumulated_batches_are_probed() -> None:
    def each(rank: int) -> Any:
        turns, late = ConvergenceProbe(every_n_steps=2), ConvergenceProbe(every_n_steps=2)
        chosen = strategy(find_unused_parameters=True)
        fit(chosen, TakeTurns(), callbacks=[turns], limit_train_batches=6)
        fit(strategy(), callbacks=[late], accumulate_grad_batches=3, limit_train_batches=6)
        return turns.latest.values(), late.latest.values()

    for results in run_launched(2, each, timeout=120):
        for values in results:
            names = [key.removeprefix("contraction/") for key in values if key.startswith("contraction/")]
            sparse = [name for name, param in TinyClassifier().named_parameters() if param.numel() > 1]
            assert sorted(names) == sorted(sparse)
            assert 0 < values["xi"] < 10


def test_plain_ddp_is_logged_and_nothing_is_probed(caplog: pytest.LogCaptureFixture) -> None:
    probe = ConvergenceProbe(every_n_steps=1)
    with caplog.at_level("INFO"):
        fit(strategy(), devices=1, callbacks=[probe], limit_train_batches=3)
    assert "ConvergenceProbe samples nothing from here on" in caplog.text
    assert probe.latest is None
    with pytest.raises(ValueError, match="every_n_steps must be a whole number, 1 or more, got 0"):
        ConvergenceProbe(every_n_steps=0)
