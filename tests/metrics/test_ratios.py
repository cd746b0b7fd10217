"""The metrics: sums by name, agreement of ranks, logging by TorchMetrics and Lightning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_safusion import SAFusionStrategy
from lightning_safusion.metrics import (
    AchievedDensity,
    BytesSent,
    CompressionError,
    TensorFigures,
    TensorMissingRate,
    tensor_figures,
)
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched, run_ranks

NAMES = ("a", "b", "c")


def figures(names: tuple[str, ...] = ("a", "b")) -> TensorFigures:
    """One window: of the first tensor 3 of 10 elements were sent, of the second nothing of 30."""
    sums = [[1, 1], [0, 1], [10, 30], [3, 0], [4.0, 1.0], [1.0, 1.0]]
    return TensorFigures(names, torch.tensor(sums, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "overall", "first", "second", "swapped"),
    [
        (TensorMissingRate, 0.5, 0.0, 1.0, 0.5),
        (AchievedDensity, 3 / 40, 0.3, 0.0, 3 / 40),
        (CompressionError, 0.4, 0.25, 1.0, 0.4),
    ],
)
def test_overall_and_by_tensor(kind: Any, overall: float, first: float, second: float, swapped: float) -> None:
    metric = kind(NAMES)
    metric.update(figures())
    assert float(metric.compute()) == pytest.approx(overall)
    assert metric.per_tensor() == pytest.approx({"a": first, "b": second})  # "c" never had a gradient
    assert float(metric(figures())) == pytest.approx(overall)  # the batch alone, as self.log has it
    metric.reset()
    metric.update(figures())
    metric.update(figures(("b", "a")))
    assert metric.per_tensor() == pytest.approx({"a": swapped, "b": swapped})


def test_state_survives_copies_and_state_dicts() -> None:
    metric = TensorMissingRate(NAMES)
    metric.update(figures())
    again = copy.deepcopy(metric)
    again.update(figures())
    assert float(again.sums[1].sum()) == 2 * float(metric.sums[1].sum())
    metric.persistent(True)
    loaded = TensorMissingRate(NAMES)
    loaded.load_state_dict(metric.state_dict())
    assert loaded.per_tensor() == metric.per_tensor()


def test_unknown_and_repeated_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 tensors \(b\) are not among this metric's 1 names"):
        TensorMissingRate(["a"]).update(figures())
    with pytest.raises(ValueError, match="names has a more than once"):
        TensorMissingRate(["a", "b", "a"])


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_without_a_window_there_is_no_rate() -> None:
    assert TensorMissingRate(NAMES).compute().isnan()
    assert TensorMissingRate(NAMES).per_tensor() == {}
    assert BytesSent().compute().isnan()


def test_ranks_add_up() -> None:
    def each(rank: int) -> Any:
        metric, sent = TensorMissingRate(NAMES), BytesSent()
        for _ in range(1 + 2 * rank):
            metric.update(figures(("a", "b") if rank == 0 else ("b", "a")))
            sent.update({"bytes_sent": 100 * (1 + rank), "dense_bytes": 4000})
        alone = float(metric.sums.sum())
        return float(metric.compute()), metric.per_tensor(), float(sent.compute()), sent.ratio(), alone

    for overall, by_tensor, sent, ratio, alone in run_ranks(2, each):
        assert overall == 0.5
        assert by_tensor == {"a": 0.75, "b": 0.25}
        assert (sent, ratio) == (175.0, 4 * 4000 / 700)
        assert alone in (3.0, 9.0)  # the state of this rank is restored after synchronisation


class Measured(TinyClassifier):
    """Logs the metric as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.missing = TensorMissingRate([name for name, _ in self.named_parameters()])

    @override
    def on_after_backward(self) -> None:
        strategy = self.trainer.strategy
        found = tensor_figures(strategy, errors=False)
        self.missing.update(found)
        self.log("missing", self.missing, on_step=False, on_epoch=True)


@pytest.mark.slow
def test_a_module_logs_the_metric() -> None:
    def each(rank: int) -> tuple[Tensor, BytesSent]:
        strategy, sent = SAFusionStrategy(system="behind", density=0.01, process_group_backend="gloo"), BytesSent()
        fit = trainer(strategy)
        fit.fit(Measured(), classification())
        sent.update(strategy.figures())
        return fit.callback_metrics["missing"], sent

    (rate, sent), (same, _) = run_launched(2, each)
    assert 0.2 < float(rate) < 0.9
    assert torch.equal(rate, same)
    assert sent.ratio() > 20
