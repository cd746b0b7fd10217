"""Tiny configurations train on two workers, learn, and go on from their checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from examples.workloads.language.bigram import bigram_perplexity
from examples.workloads.language.tokens import Vocabulary
from examples.workloads.make_tiny_data import make_cifar100, make_imagenet, make_squad, make_wikitext2, make_wikitext103
from tests.examples.workload_runs import ROOT, Run, fit
from tests.packaging.environments import run

pytestmark = pytest.mark.slow  # seconds each

MAKERS: dict[str, Callable[[Path], None]] = {
    "wikitext2": make_wikitext2,
    "wikitext103": make_wikitext103,
    "cifar100": make_cifar100,
    "imagenet": make_imagenet,
    "squad": make_squad,
}
#: What is validated, and a value that a model which has learnt nothing does not reach: there are eight kinds of images
#: and six colours; all letters, or byte pairs, alike would be a perplexity of 90, or 400. One of each network and of
#: each kind of data; tests/e2e trains another under Slurm.
BOUNDS = {
    "lstm_wikitext2": ("val_perplexity", 10.0),  # a bigram model is above, see below
    "gpt2_large_wikitext103": ("val_perplexity", 200.0),
    "resnet152_cifar100": ("val_top1", 0.3),
    "vgg19_imagenet": ("val_top1", 0.2),
    "vit_large_imagenet": ("val_top1", 0.2),
    "bert_base_squad": ("val_f1", 35.0),
}
RESUMED = ("lstm_wikitext2", "resnet152_cifar100", "bert_base_squad")


def assert_learnt(workload: str, run: Run) -> None:
    """The loss has fallen, and the last validation is beyond the bound."""
    losses = run.column("loss")
    assert fmean(losses[-2:]) < 0.9 * fmean(losses[:2])
    metric, bound = BOUNDS[workload]
    values = run.column(metric)
    assert len(values) == 2  # epochs
    assert values[-1] < bound if metric == "val_perplexity" else values[-1] > bound


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Makes the data set of a workload once; returns the options that name it."""
    folder = tmp_path_factory.mktemp("data")

    def options(workload: str) -> list[str]:
        name = workload.rsplit("_", 1)[-1]
        if not (folder / name).exists():
            MAKERS[name](folder / name)
        vocabulary = {"wikitext103": folder / name, "squad": folder / name / "vocab.txt"}.get(name)
        given = [f"--data.init_args.folder={folder / name}"]
        return given if vocabulary is None else [*given, f"--data.init_args.vocabulary={vocabulary}"]

    return options


@pytest.mark.parametrize("workload", sorted(BOUNDS))
def test_a_sparse_training_learns(workload: str, data: Callable[[str], list[str]], tmp_path: Path) -> None:
    """One of each kind of data also goes on from its checkpoint."""
    first = fit(tmp_path / "first", workload, *data(workload))
    assert_learnt(workload, first)
    if workload not in RESUMED:
        return
    third = ["--trainer.max_epochs=3", f"--ckpt_path={first.checkpoint}"]
    resumed = fit(tmp_path / "resumed", workload, *data(workload), *third)
    assert len(resumed.column(BOUNDS[workload][0])) == 1
    assert min(resumed.column("step")) >= max(first.column("step"))
    assert resumed.column("loss")[0] < first.column("loss")[0]


def test_a_bigram_model_does_not_reach_the_bound_of_the_lstm(data: Callable[[str], list[str]]) -> None:
    (folder,) = data("lstm_wikitext2")
    text = Path(folder.split("=")[1])
    vocabulary = Vocabulary(text / "wiki.train.tokens", 90)
    train, held_out = (vocabulary.encode(text / f"wiki.{split}.tokens") for split in ("train", "valid"))
    assert bigram_perplexity(train, held_out, len(vocabulary)) > BOUNDS["lstm_wikitext2"][1]


def test_a_dense_baseline_learns(data: Callable[[str], list[str]], tmp_path: Path) -> None:
    assert_learnt("lstm_wikitext2", fit(tmp_path, "lstm_wikitext2", *data("lstm_wikitext2"), dense=True))


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """As a user types them, with the default folders, in processes of their own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    short = ["--trainer.limit_train_batches=45", "--trainer.limit_val_batches=1", "--trainer.max_epochs=1"]
    tiny = [f"examples/workloads/configs/lstm_wikitext2{suffix}.yaml" for suffix in ("", "_tiny")]
    fit_tiny = ["examples.workloads", "fit", "--config", tiny[0], "--config", tiny[1], *short]
    for module in (["examples.workloads.make_tiny_data"], fit_tiny):
        run(sys.executable, "-m", *module, cwd=tmp_path, timeout=120, OMP_NUM_THREADS="1")
    logs = tmp_path / "runs" / "lstm_wikitext2_tiny" / "lightning_logs" / "version_0"
    left = {path.name for path in logs.rglob("*")}
    assert left >= {"last.ckpt", "config.yaml", "overlap.json", "missing_rate.json"}
    assert any(name.startswith("events.out.tfevents") for name in left)
