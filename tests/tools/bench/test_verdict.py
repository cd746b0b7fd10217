"""The verdict of a benchmark, from steps of known times; what is known of accuracy; the turning point."""

from __future__ import annotations

from datetime import timedelta
from math import inf
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.accuracy import COMPARE, faster_row, known_accuracy
from lightning_safusion.tools.bench.files import with_strategy
from lightning_safusion.tools.bench.forecast import Recorded, known_device, rate_in_words, turning_point
from lightning_safusion.tools.bench.outcome import JobConditions, table_of
from lightning_safusion.tools.bench.results import Turned, summarize
from lightning_safusion.tools.bench.verdict import Verdict, best_strategy, decide, judge
from lightning_safusion.tools.plan.calibration import Calibration
from tests.tools.bench.test_results import REPORT
from tests.tools.plan.test_calibration import straight

DEFAULT, SPARSE, DENSER = "saf-pooled", "saf-pooled[density=0.02]", "saf-pooled[density=0.1]"


def turns(*seconds: float, loading: float = 0.01, optimizer: str = "AdamW", **known: Any) -> list[list[Turned]]:
    """Rounds of two workers, whose steps take so long after a first one."""
    known = {"peak_bytes": 100, "optimizers": [optimizer]} | known
    return [[Turned([9.0, each, each], [9.0, loading, loading], **known) for _ in range(2)] for each in seconds]


def rounds(**more: list[list[Turned]]) -> dict[str, list[list[Turned]]]:
    for name in more:
        for turned in (each for ranks in more[name] for each in ranks if name.startswith(DEFAULT)):
            turned.figures = turned.figures or REPORT | {"achieved_density": 0.1 if name == DENSER else 0.02}
    return {"no-exchange": turns(0.2, 0.2, 0.2), "barrier": turns(0.21, 0.2, 0.2), "ddp": turns(1.0, 1.1, 0.9)} | more


def decided(given: dict[str, list[list[Turned]]]) -> tuple[str, str]:
    best, baseline = decide(summarize(given), given)
    return best.system, baseline.system


def said(given: dict[str, list[list[Turned]]], point: Any = None, rival: str = "ddp") -> Verdict:
    return judge(summarize(given), given, point, DEFAULT, rival)


@pytest.mark.parametrize(
    ("more", "best"),
    [
        ({}, "ddp"),
        ({DEFAULT: turns(0.4, 0.4, 0.4)}, DEFAULT),
        ({DEFAULT: turns(0.99, 1.08, 0.89)}, "ddp"),  # less than three per cent
        ({DEFAULT: turns(0.4, 1.2, 1.0)}, "ddp"),  # in one round of three
        ({DEFAULT: turns(0.4, 0.4, 1.0)}, "ddp"),  # in two of three: the machine may have been busy in these
        ({DEFAULT: turns(0.4, 0.4, 0.4), "ddp-bf16": turns(0.405, 0.405, 0.405)}, "ddp-bf16"),  # the plainer one
        ({DENSER: turns(0.4, 0.4, 0.4), SPARSE: turns(0.395, 0.395, 0.395)}, DENSER),  # what sends more
        ({DENSER: turns(0.4, 0.4, 0.4), SPARSE: turns(0.3, 0.3, 0.3)}, SPARSE),
        # DDP in all but name
        ({DEFAULT: turns(0.4, 0.4, 0.4, figures=dict.fromkeys(REPORT) | {"plain_ddp": "it is faster"})}, "ddp"),
        # sends everything
        ({DEFAULT: turns(0.4, 0.4, 0.4, figures=REPORT | {"achieved_density": 1.0})}, "ddp"),
        ({"powersgd": turns(0.3, 0.3, 0.3)}, "ddp"),
        ({DEFAULT: turns(0.4)}, DEFAULT),  # stopped in the second round
    ],
)
def test_the_plainest_of_the_fastest_rows_is_taken(more: dict[str, Any], best: str) -> None:
    assert decided(rounds(**more)) == (best, "ddp")


def test_it_is_said_in_words() -> None:
    given = rounds(**{DEFAULT: turns(0.25, 0.25, 0.25, peak_bytes=31_000_100, density=0.02, figures=REPORT)})
    text = " ".join(said(given, (2.1e9, 9.5e7)).sentences)
    assert "Take saf-pooled: 250 ms per step, 4.00 times as fast as ddp (1.00 s)." in text
    assert "800 ms of a step of ddp are the exchange" in text
    assert "Memory: 31 MB more per worker than ddp" in text
    assert "By simulation the answer changes above about 2.1 Gbit/s" in text
    assert "collectives carry about 95 Mbit/s here" in text
    assert "at a density of 0.02 ended at most 2.7 % above" in text
    assert "waits for data longer" not in text


def test_a_slow_worker_is_named_with_batches_that_suit_it() -> None:
    def floor(*own: float, samples: int | None = 16) -> dict[str, Any]:
        return rounds() | {"no-exchange": [[Turned([9.0, each], [9.0, 0.01], samples) for each in own]]}

    text = " ".join(said(floor(0.1, 0.3)).sentences)
    assert "The others wait for rank 1: its step takes 300 ms without any exchange, theirs 100 ms." in text
    assert 'With weighting="samples", batches of 24 on rank 0 (16 now), 8 on rank 1 (16 now) would let them' in text
    assert "batches times 1.50 on rank 0" in " ".join(said(floor(0.1, 0.3, samples=None)).sentences)
    assert "wait for rank" not in " ".join(said(floor(0.3, 0.301)).sentences)


@pytest.mark.parametrize("peak", [100, 600_100, 0])
def test_memory_that_does_not_differ_is_not_called_less(peak: int) -> None:
    given = rounds(**{DEFAULT: turns(0.25, 0.25, 0.25, peak_bytes=peak)})
    given["ddp"] = turns(1.0, 1.1, 0.9, peak_bytes=400_000 if peak else 100)
    text = " ".join(said(given).sentences)
    assert ("Memory: as much per worker as ddp, within 1 MB" in text) == bool(peak)
    assert "0 MB" not in text


def test_the_best_dense_row_is_named_beside_the_users() -> None:
    given = rounds(**{DEFAULT: turns(0.25, 0.25, 0.25), "ddp-bf16": turns(0.5, 0.5, 0.5)})
    verdict = said(given, (2.1e9, None), "ddp-bf16")
    assert "4.00 times as fast as ddp (1.00 s), 2.00 times as fast as ddp-bf16." in verdict.sentences[0]
    assert any("above about 2.1 Gbit/s per machine: ddp-bf16 is as fast there" in each for each in verdict.sentences)


def test_what_is_known_of_accuracy_is_of_two_workers() -> None:
    def of(workers: int, optimizer: str = "AdamW") -> str:
        return known_accuracy(DEFAULT, 0.02, [optimizer], workers=workers)

    assert "With 16 owners of shards" in of(16)
    assert "With 6 on GPUs with slow links owners of shards" in of(6)
    assert "owners of shards" not in of(5) + of(16, "Unknown")


def test_what_stays_is_said_too() -> None:
    given = rounds(**{DEFAULT: turns(1.2, 1.2, 1.2), "powersgd": turns(0.5, 0.5, 0.5)})
    given["ddp"] = turns(1.0, 1.1, 0.9, loading=2.0)
    text = " ".join(said(given, (3e7, None)).sentences)
    assert text.startswith("Keep ddp: no row is faster by more than 3%")
    assert "changes below about 30 Mbit/s per machine: saf-pooled is faster there." in text
    assert "powersgd is faster (500 ms), and not recommended: PowerSGD of rank 1 ended 36 % above" in text
    assert "Accuracy stays that of plain DDP." in text
    assert "waits for data longer than for gradients" in text
    assert "at no bandwidth" in " ".join(said(given, (None, None)).sentences)
    assert "at every bandwidth" in " ".join(said(given, (inf, None)).sentences)


def test_doubts_are_said() -> None:
    given = rounds(**{DEFAULT: turns(0.4, 0.4, 0.4, figures=REPORT | {"achieved_density": 1.0})})
    assert "saf-pooled sends everything" in " ".join(said(given).sentences)
    assert "one round" not in " ".join(said(given).sentences)
    given = {"no-exchange": turns(3.0), "barrier": turns(1.0), "ddp": turns(1.0)}
    text = " ".join(said(given).sentences)
    assert "These times are disturbed" in text
    assert "from one round" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((DEFAULT, 0.02, ["AdamW"]), "density of 0.02 ended at most 2.7 % above"),
        ((DEFAULT, 0.03, ["Adam"]), "density of 0.02"),  # the next that is no larger
        ((DEFAULT, 0.0005, ["AdamW"]), "less than that (0.0005) was not measured"),
        ((DEFAULT, 0.1, ["SGD"]), "LSTM"),
        ((DEFAULT, 0.02, ["Lion"]), "9.7 %"),
        ((DEFAULT, 0.1, ["schedule-free AdamWScheduleFree"]), "level (0.3 % above)"),
        ((DEFAULT, 0.1, ["Shampoo"]), "with Shampoo and saf-pooled is not known"),
        (("oktopk", 0.1, ["AdamW"]), "with AdamW and oktopk is not known"),
        (("ddp-bf16", None, ["AdamW"]), "rounds gradients"),
        ((DEFAULT, 0.1, ["NAdam"], ["NAdam may end higher"]), "NAdam may end higher. Accuracy with NAdam"),
    ],
)
def test_what_is_known_of_accuracy(given: tuple[Any, ...], words: str) -> None:
    assert words in known_accuracy(*given)


def test_accuracy_of_a_row_with_other_parts_is_not_known() -> None:
    for row, known in ((SPARSE, True), ("saf-pooled[memory=none,density=0.02]", False)):
        text = " ".join(said(rounds(**{row: turns(0.4, 0.4, 0.4, density=0.02)})).sentences)
        assert ("ended at most 2.7 % above" in text) == known
        assert (f"with AdamW and {row} is not known. {COMPARE}" in text) != known


def test_a_strategy_that_has_failed_is_replaced() -> None:
    verdict = said(rounds())
    assert best_strategy(verdict, {"static_graph": True}) is None
    strategy = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"static_graph": True}}
    assert best_strategy(verdict, {"static_graph": True}, failed=True) == strategy


def test_a_row_that_has_gone_dense_sends_all() -> None:
    dense = REPORT | {"achieved_density": 1.0, "bytes_sent": 4005}  # of 1,000 elements, and headers
    given = rounds(**{DEFAULT: turns(0.4, figures=dense), SPARSE: turns(0.4, figures=REPORT | {"bytes_sent": 80})})
    table = table_of(summarize(given), JobConditions("a job", 1, 1, "cpu", 1000))
    column = next(each for each in table.columns if each.header == "sent")
    assert list(column.cells)[-2:] == ["all", "2.00%"]
    assert "; 1 worker on one machine" in str(table.title)


def test_without_a_floor_ddp_is_the_floor() -> None:
    given = rounds(**{DEFAULT: turns(0.4, 0.4, 0.4)})
    del given["no-exchange"]
    assert decided(given) == (DEFAULT, "ddp")
    assert summarize(given)[1].over_floor == 1.0


def recorded(megabytes: float = 40.0) -> Recorded:
    """A job of 60 ms on two workers, with collectives of 1 Gbit/s."""
    tensors = tuple(TraceTensor(f"t{i}", (int(megabytes * 1e6 / 40), 1), 4e-3, 1e-3) for i in range(10))
    times = straight(LinearCost(1e-4, 8e-9))
    costs = Calibration(2, times, times, 6.0, nodes=2, per_node=1)
    return Recorded(Trace("job", tensors, 1e-2), costs)


def test_the_turning_point_is_where_the_exchange_hides_by_itself() -> None:
    turning, carried = turning_point(recorded(), "saf-pooled", 0.02, "ddp")
    assert carried == pytest.approx(1e9, rel=0.01)
    # 40 MB are exchanged in half of a step of 60 ms at about 10 Gbit/s
    assert turning is not None
    assert 2e9 < turning < 1e11
    more, _ = turning_point(recorded(megabytes=400.0), "saf-pooled", 0.02, "ddp")
    assert more is not None
    assert more > 1.5 * turning
    assert turning_point(recorded(), "ddp", None, "ddp")[0] is None


def test_devices_by_the_names_of_drivers() -> None:
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "Tesla V100-SXM2-32GB")
    assert [known_device(name) for name in names] == ["a100", "h100", "h100", None]


def test_rates_in_words() -> None:
    words = [rate_in_words(rate) for rate in (9.46e7, 2.14e9, 1.2e11, 5e5, 2.34e8)]
    assert words == ["95 Mbit/s", "2.1 Gbit/s", "120 Gbit/s", "500 kbit/s", "234 Mbit/s"]


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        (DEFAULT, {}),
        ("saf-pooled[density=0.1,memory=residual]", {"density": 0.1, "memory": "residual"}),
        ("ddp-bf16", {"system": "ddp-bf16"}),
        ("ddp", {}),
    ],
)
def test_the_strategy_in_the_users_file(row: str, arguments: dict[str, Any]) -> None:
    kind = "lightning.pytorch.strategies.DDPStrategy" if row == "ddp" else "lightning_safusion.SAFusionStrategy"
    strategy = {"class_path": kind, "init_args": {**arguments, "static_graph": True}}
    made = best_strategy(Verdict(row, "yours", ()), {"static_graph": True})
    content = {"fit": {"trainer": {"devices": 2, "strategy": "ddp"}, "model": {"class_path": "a.B"}}}
    read = yaml.safe_load(with_strategy(content, made))
    assert read["fit"]["trainer"] == {"devices": 2, "strategy": strategy}
    assert read["fit"]["model"] == {"class_path": "a.B"}
    assert yaml.safe_load(with_strategy({}, made)) == {"trainer": {"strategy": strategy}}


@pytest.mark.parametrize("row", ["ddp", DEFAULT])
def test_options_of_the_users_strategy_stay_in_the_file(row: str) -> None:
    saving = {"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO"}
    given = {"timeout": "0:05:00", "checkpoint_io": saving, "process_group_backend": "gloo", "density": 0.3}
    hook = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook"
    mine = {"class_path": "lightning_safusion.SAFusionStrategy", "init_args": {**given, "ddp_comm_hook": hook}}
    content = {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": mine}}
    made = best_strategy(Verdict(row, "yours", ()), {"process_group_backend": "gloo", "timeout": timedelta(minutes=5)})
    written = with_strategy(content, made)
    arguments = yaml.safe_load(written)["trainer"]["strategy"]["init_args"]
    assert arguments == {name: value for name, value in given.items() if name != "density"}
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    strategy = parser.instantiate_classes(parser.parse_string(written)).trainer.strategy
    assert strategy._timeout == timedelta(minutes=5)
    assert isinstance(strategy.checkpoint_io, TorchCheckpointIO)


def test_the_users_own_strategy_stays_in_the_file() -> None:
    content = {"trainer": {"strategy": {"class_path": "a.B"}}}
    assert best_strategy(Verdict("ddp", "ddp", ()), {}) is None
    assert yaml.safe_load(with_strategy(content, None)) == content
    assert yaml.safe_load(with_strategy({}, None)) == {"trainer": {"strategy": "ddp"}}


def test_a_faster_row_says_why_it_is_not_recommended() -> None:
    assert faster_row("ddp", "7 ms") == "ddp is faster (7 ms), with the gradients of DDP: try it first."
    assert "not recommended: its accuracy is not known" in faster_row("my.System", "7 ms")
