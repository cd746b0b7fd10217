"""LightningCLI: every documented configuration, overrides, round trips, help and errors; and the README's diff."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_safusion as saf
from examples.cli import DigitsCLI
from lightning_safusion import SAFusionStrategy
from tests.e2e.processes import started
from tests.models import equal, weights
from tests.process_group import run_alone, run_script
from tests.quick import quick_of

ROOT = Path(__file__).parents[2]
BY_NAME = {path.stem: path for path in (ROOT / "examples" / "configs").glob("*.yaml")}
SHARDED = BY_NAME.pop("model_parallel")  # of another strategy
CLASS = "--trainer.strategy=SAFusionStrategy"

# The same strategy in Python.
IN_PYTHON: dict[str, Callable[[], SAFusionStrategy]] = {
    "names": SAFusionStrategy,
    "parts": lambda: SAFusionStrategy(
        "gaussiank", 0.05, "safusion", "aligned", quota="pooled", memory="residual", collective="allgather",
        wire="bf16", dense=["stem.*", "*.bias"],
    ),
    "compressor": lambda: SAFusionStrategy(
        saf.SIDCo(fit="gamma_gpareto", stages=2), 0.01, memory=saf.ResidualMemory(decay=0.99), collective="allgather"
    ),
    "schedule": lambda: SAFusionStrategy(
        density=saf.DenseStart(saf.ExponentialRamp(0.25, 0.01, steps=60), steps=5), collective="allgather"
    ),
    "fusion": lambda: SAFusionStrategy(
        density=0.02, fusion=saf.Adaptive("paper", cadence=saf.Cadence(every=20, freeze_after=200)),
        collective="allgather",
    ),
    "dgc": lambda: SAFusionStrategy(
        "dgc", saf.DGCWarmup(0.001, epochs=4), memory=saf.DGCMemory(momentum=0.9, clip=1.0), collective="allgather"
    ),
    "callbacks": lambda: SAFusionStrategy(density=0.05, system="behind"),
    "trainer": lambda: SAFusionStrategy(density=0.05, process_group_backend="gloo", timeout=timedelta(minutes=10)),
}  # fmt: skip


class Outcome(Callback):
    """Writes what each worker ended with: under fork only files come back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        outcome = {
            "parameters": weights(pl_module),
            "report": trainer.strategy.figures(),
            "bucket_view": trainer.strategy.model.gradient_as_bucket_view,
            "steps": trainer.global_step,
        }
        torch.save(outcome, self.folder / f"rank{trainer.global_rank}.pt")


def parse(*args: str | Path) -> DigitsCLI:
    return DigitsCLI([str(arg) for arg in args], run=False)


def strategy_of(cli: DigitsCLI) -> SAFusionStrategy:
    strategy = cli.trainer.strategy
    assert isinstance(strategy, SAFusionStrategy)
    return strategy


def fit(folder: Path, *args: str | Path) -> list[dict[str, Any]]:
    """Trains for 4 steps of 2 epochs on two forked workers; returns what each ended with."""
    folder.mkdir(exist_ok=True)
    short = [
        f"--trainer.default_root_dir={folder}", "--trainer.max_steps=4", "--trainer.limit_train_batches=2",
        "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--model.widths=[8,16]",
    ]  # fmt: skip
    DigitsCLI(["fit", *map(str, args), *short], trainer_defaults={"callbacks": [Outcome(folder)]})
    return [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]


def printed_config(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        DigitsCLI(["fit", *map(str, args), "--print_config"])
    assert not ended.value.code
    return capsys.readouterr().out


def test_every_configuration_is_listed_in_the_guide_and_known_here() -> None:
    assert BY_NAME.keys() == IN_PYTHON.keys()
    guide = (ROOT / "docs" / "guide" / "yaml.md").read_text()
    assert set(re.findall(r"\(\.\./\.\./examples/configs/(\w+)\.yaml\)", guide)) == {*IN_PYTHON, SHARDED.stem}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_configuration_means_what_python_says(name: str) -> None:
    strategy, expected = strategy_of(parse("--config", BY_NAME[name])), IN_PYTHON[name]()
    assert strategy.settings.describe() == expected.settings.describe()
    for attribute in ("system", "process_group_backend", "dense_rules", "_timeout", "_start_method"):
        assert getattr(strategy, attribute) == getattr(expected, attribute), attribute


def test_the_configuration_of_a_sharded_model_means_what_python_says() -> None:
    strategy = parse("--config", SHARDED).trainer.strategy
    expected = saf.SAFusionModelParallelStrategy(0.05, replicate_size=2, collective="allgather")
    assert isinstance(strategy, saf.SAFusionModelParallelStrategy)
    assert strategy.settings.describe() == expected.settings.describe()
    assert strategy.sizes == expected.sizes


@pytest.mark.slow
def test_the_configuration_of_a_sharded_model_trains(tmp_path: Path) -> None:
    short = ["--trainer.max_steps=6", "--model.widths=[8,16]", f"--trainer.default_root_dir={tmp_path}"]
    command = [sys.executable, ROOT / "examples" / "cli.py", "fit", "--config", SHARDED, *short]
    with started(command, tmp_path / "output") as training:
        assert re.search(r"SAFusion: 32 tensors travel in \d+ buffers", training.finish(120))


@pytest.mark.parametrize("name", quick_of([name for name in IN_PYTHON if name != "names"], ["parts"]))
def test_a_configuration_trains(name: str, tmp_path: Path) -> None:
    first, second = fit(tmp_path, "--config", BY_NAME[name], "--trainer.strategy.start_method=fork")
    assert first["report"]["windows"] == first["steps"] == second["steps"] == 4  # exchanges: one per optimizer step
    assert first["report"]["plain_ddp"] is None
    assert first["report"]["tensors"] == len(first["parameters"]) == 32
    assert equal(first["parameters"], second["parameters"])
    assert all(p.isfinite().all() for p in first["parameters"])


@pytest.mark.slow
def test_the_shortest_configuration_trains_as_a_script_and_saves_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--config", str(ROOT / "examples" / "configs" / "names.yaml")]
    short = ["--trainer.max_steps=6", "--trainer.limit_train_batches=3", "--model.widths=[8,16]"]
    command = [sys.executable, ROOT / "examples" / "cli.py", "fit", *names, *short]
    with started(command, tmp_path / "output") as training:  # Lightning starts it once more for the second worker
        assert re.search(r"SAFusion: 32 tensors travel in \d+ buffers", training.finish(120))
    (saved,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    # as values: what was imported before decides whether the CLI takes a 3 that may be an int or a float for 3 or 3.0
    configuration = yaml.safe_load(saved.read_text())
    assert yaml.safe_load(printed_config(capsys, "--config", saved)) == configuration
    assert yaml.safe_load(printed_config(capsys, *names, *short)) == configuration


@pytest.mark.parametrize("name", quick_of(IN_PYTHON, ("compressor", "dgc")))
def test_a_printed_configuration_gives_itself(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_config(capsys, "--config", BY_NAME[name])
    (tmp_path / "printed.yaml").write_text(printed)
    assert printed_config(capsys, "--config", tmp_path / "printed.yaml") == printed
    assert "lightning_safusion.sparsify" not in printed  # classes are named as users name them
    given, full = yaml.safe_load(BY_NAME[name].read_text()), yaml.safe_load(printed)
    assert _contains(full, given)


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return all(key in whole and _contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(_contains, whole, part))
    return str(whole) == str(part)  # a number in the file may be printed as 0:10:00


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([CLASS, "--trainer.strategy.density=0.1"], lambda: SAFusionStrategy(density=0.1)),
        (["--trainer.strategy=safusion"], SAFusionStrategy),
        (["--config", "parts", "--trainer.strategy=safusion"], SAFusionStrategy),
        (
            [CLASS, "--trainer.strategy.compressor=SIDCo", "--trainer.strategy.compressor.stages=2"],
            lambda: SAFusionStrategy(saf.SIDCo(stages=2)),
        ),
        (
            ["--config", "compressor", "--trainer.strategy.compressor.stages=1", "--trainer.strategy.memory=none"],
            lambda: SAFusionStrategy(saf.SIDCo("gamma_gpareto", 1), 0.01, memory="none", collective="allgather"),
        ),
        (
            ["--config", "schedule", "--trainer.strategy.density.density.end=0.02"],
            lambda: SAFusionStrategy(
                density=saf.DenseStart(saf.ExponentialRamp(0.25, 0.02, steps=60), 5), collective="allgather"
            ),
        ),
        (
            [
                CLASS, "--trainer.strategy.fusion=Aligned", "--trainer.strategy.fusion.tensors_per_buffer=3",
                '--trainer.strategy.dense=["*.bias"]', "--trainer.strategy.scope=tensor",
            ],
            lambda: SAFusionStrategy(fusion=saf.Aligned(3), dense=["*.bias"], scope="tensor"),
        ),
    ],
)  # fmt: skip
def test_the_command_line_overrides(args: list[str], expected: Callable[[], SAFusionStrategy]) -> None:
    strategy = strategy_of(parse(*(BY_NAME.get(arg, arg) for arg in args)))
    assert strategy.settings.describe() == expected().settings.describe()
    assert strategy.dense_rules == expected().dense_rules


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("compressor=gausiank", "unknown compressor 'gausiank'. Did you mean 'gaussiank'? Choose one of 'topk',"),
        ("density=2", "density must be in (0, 1], got 2.0"),
        ("scope=layer", "Literal['tensor', 'group']"),
        ("collective=alltoall", "'auto', 'allgather', 'hybrid', 'hierarchical', 'hierarchical-sharded', 'allreduce', "),
        ("transport=mpi", "Literal['torch'"),
        ("compresor=topk", "Option 'compresor' is not accepted"),
        ("compressor.class_path=lightning_safusion.GausianK", "no attribute 'GausianK'; it has DGC, SYSTEMS, WFBP,"),
        ("density.class_path=lightning_safusion.TopK", "does not correspond to a subclass of DensitySchedule"),
    ],
)
def test_a_wrong_name_gives_the_alternatives(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as ended:
        parse(CLASS, f"--trainer.strategy.{option}")
    assert message in str(ended.value) + capsys.readouterr().err


def test_help_has_our_texts_and_ddps_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--trainer.strategy.help=SAFusionStrategy")
    text = " ".join(capsys.readouterr().out.split())
    for name in ("find_unused_parameters", "static_graph", "process_group_backend", "timeout", "bucket_cap_mb"):
        assert f"--trainer.strategy.{name}" in text
    own = [name for name in signature(SAFusionStrategy).parameters if name != "kwargs"]
    for name in own:
        described = re.search(rf"^        {name}: (\S.*)$", SAFusionStrategy.__doc__ or "", re.MULTILINE)
        assert described, f"{name} has no description"
        assert f"--trainer.strategy.{name}" in text
        assert described[1].strip() in text, f"the help of {name} lacks its description"
    for part in ("GaussianK", "DGCWarmup", "Adaptive", "DGCMemory"):
        assert f"lightning_safusion.{part}" in text  # known subclasses


@pytest.mark.slow
def test_explicit_defaults_of_ddp_change_nothing(tmp_path: Path) -> None:
    """The CLI passes every argument of DDP, with its default; the strategy must tell a default from a wish."""
    options = strategy_of(parse(CLASS, "--trainer.strategy.density=0.05"))._ddp_kwargs
    assert {"bucket_cap_mb", "static_graph", "gradient_as_bucket_view", "mixed_precision"} <= set(options)
    assert strategy_of(parse(CLASS, "--trainer.strategy.bucket_cap_mb=3"))._ddp_kwargs["bucket_cap_mb"] == 3

    workers = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.deterministic=true"]
    # in processes of their own: the trainer switches determinism on for the whole process
    explicit = run_alone(fit, tmp_path / "class", CLASS, "--trainer.strategy.start_method=fork", *workers)
    implied = run_alone(fit, tmp_path / "name", "--trainer.strategy=safusion_fork", *workers)
    for one, other in zip(explicit, implied, strict=True):
        assert one["bucket_view"]
        assert one["report"]["plan"] == other["report"]["plan"]
        assert one["report"]["bytes_sent"] == other["report"]["bytes_sent"]
        assert equal(one["parameters"], other["parameters"])


@pytest.mark.slow
def test_the_diff_of_the_readme_turns_the_ddp_script_into_one_that_runs(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    source = (ROOT / "examples" / "ddp_script.py").read_text()
    assert source.count('strategy="ddp"') == 1
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        assert source.count(before) == 1, f"not in the script: {before}"
        source = source.replace(before, "".join(line[1:] for line in lines if line[0] in " +"))
    assert "ddp" not in source.split('"""', 2)[2]
    (tmp_path / "script.py").write_text(source)
    printed, _ = run_script(tmp_path / "script.py", tmp_path)
    accuracy = re.search(r"^accuracy ([\d.]+)$", printed, re.MULTILINE)
    assert accuracy, printed
    assert float(accuracy[1]) > 0.85  # three pairs of four are in different quadrants: 0.75 is for nothing
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt"))
