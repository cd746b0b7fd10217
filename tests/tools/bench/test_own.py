"""``safusion bench`` on a job of the user: two workers of a small job, and what goes wrong with it."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import DDPStrategy

from lightning_safusion.tools.bench import run as benchmark
from lightning_safusion.tools.bench.files import read_files
from lightning_safusion.tools.bench.job import JobOptions, parse_job
from lightning_safusion.tools.bench.launch import counted, processes
from lightning_safusion.tools.bench.run import run_bench, run_own
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.report import run_plan
from tests.e2e.processes import ROOT, environment, started
from tests.process_group import run_alone, run_launched

JOB = "tests.tools.bench.own_job"
ROW = "saf-pooled[density=0.1,collective=allgather]"
SHORT: dict[str, Any] = {"rounds": 2, "block": 3, "warmup": 24, "calibrate": False, "systems": (ROW,)}
CONFIG: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "strategy": "ddp_find_unused_parameters_true",
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs of the user"}},
        "callbacks": [
            {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "checkpoints"}},
            {"class_path": f"{JOB}.Writes"},
            {"class_path": f"{JOB}.Counts"},
        ],
    },
    "data": {"class_path": f"{JOB}.Data"},
}


def config(folder: Path, model: str = "Net", more: Mapping[str, Any] = MappingProxyType({}), **trainer: Any) -> str:
    """Writes a user's file: with a model of ``own_job``, other sections, and arguments of the trainer."""
    path = folder / "config.yaml"
    content = CONFIG | {"model": {"class_path": f"{JOB}.{model}"}, "trainer": CONFIG["trainer"] | trainer} | more
    path.write_text(yaml.safe_dump(content))
    return str(path)


def bench(folder: Path, spy: Any = None, workers: int = 2, **options: Any) -> list[Any]:
    """Runs the benchmark on workers as a launcher starts them; returns what ``spy`` says of each."""
    given = JobOptions(**(SHORT | {"output": str(folder / "out")} | options))

    def run(rank: int) -> Any:
        os.chdir(folder)
        os.environ["LOCAL_WORLD_SIZE"] = str(workers)  # as torchrun says it
        made, plain = [], benchmark.Bench

        def spied(*args: Any) -> benchmark.Bench:
            made.append(plain(*args))
            return made[0]

        setattr(benchmark, "Bench", spied)  # noqa: B010 (a function in the place of a class)
        run_own(given)
        return spy(made[0]) if spy is not None else None

    return run_launched(workers, run, timeout=120)


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "out" / "bench.json").read_text())
    return content


def test_a_job_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def spy(made: Any) -> Any:
        return made.module.began, made.module.set_up, made.data.set_up, made.module.counted

    (first, second) = bench(tmp_path, spy, config=[config(tmp_path)], keep_callbacks=("Counts",), warmup=12)
    assert first == second
    began, module_set_up, data_set_up, counted = first
    assert len(began) == 2 * 4  # rounds, rows
    assert len(set(began)) == 1  # the same weights in every turn
    assert module_set_up == data_set_up == 1
    assert counted > 2 * 4 * 3
    content = results(tmp_path)
    assert [row["system"] for row in content["systems"]] == ["no-exchange", "barrier", "ddp", ROW]
    assert content["left_out"] == {}
    assert content["baseline"] == "ddp"
    assert content["workers"] == 2
    assert any("Accuracy" in sentence for sentence in content["verdict"])
    sparse = content["systems"][-1]
    assert 0.05 < sparse["density"] < 0.2
    with (tmp_path / "out" / "steps.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 * 2 * 2  # rows, rounds, steps without the first
    assert {line["round"] for line in lines} == {"1", "2"}
    assert all(float(line["slowest_s"]) >= float(line["seconds"]) > 0 for line in lines)
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert best["model"] == {"class_path": f"{JOB}.Net"}
    assert (tmp_path / "out" / "bench.png").stat().st_size > 0
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "out"}  # nothing of the user's is written
    shown = " ".join(capfd.readouterr().out.split())
    assert "Left out of the benchmark: ModelCheckpoint, Writes, the logger." in shown
    assert "round 2 of 2: ddp" in shown
    assert "quartiles" in shown


@pytest.mark.slow
def test_classes_are_enough_and_files_for_plan_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, data = f"{JOB}:Net", f"{JOB}:Data"
    bench(tmp_path, model=model, data=data, rounds=1, block=2, calibrate=True)
    assert "By simulation" in " ".join(capfd.readouterr().out.split())
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert list(best) == ["trainer"]
    files = {"trace": str(tmp_path / "out" / "trace.json"), "calibration": str(tmp_path / "out" / "calibration.json")}
    run_plan(**files, systems="ddp-bf16,saf-pooled")
    printed = " ".join(capfd.readouterr().out.split())
    assert "Net: 0.0 M parameters" in printed
    assert "2 x 1 workers (nodes and workers of a node as in" in printed
    costs = Calibration.load(files["calibration"])
    assert (costs.nodes, costs.per_node, costs.device) == (1, 2, None)


@pytest.mark.slow
def test_a_row_that_fails_on_one_worker_or_is_refused_is_left_out_on_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = "saf-pooled[memory=dgc]"
    rows = (ROW, "ddp-bf16", refused)
    began = bench(
        tmp_path, lambda made: made.module.began, config=[config(tmp_path, "FailsOnOne")], systems=rows, rounds=1
    )
    assert began[0] == began[1]
    assert len(set(began[0])) == 1
    content = results(tmp_path)
    names = [row["system"] for row in content["systems"]]
    assert names == ["no-exchange", "barrier", "ddp"]  # DDP with a hook is of the strategy that fails, too
    assert set(content["left_out"]) == set(rows)
    assert "out of memory" in content["left_out"]["ddp-bf16"]
    assert "memory='dgc' applies momentum" in content["left_out"][refused]
    assert len(content["verdict"]) > 2
    assert "is left out: OutOfMemoryError" in " ".join(capfd.readouterr().out.split())


@pytest.mark.slow
def test_a_job_that_changes_while_it_trains_is_the_same_in_every_turn(tmp_path: Path) -> None:
    """State of its own, frozen layers, files, schedules that end or want a metric, optimizers of the file, teardown."""
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
    schedule = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 1e-3, "total_steps": 5}}
    data = {"class_path": f"{JOB}.TornDown", "init_args": {"batches": 3}}
    path = config(tmp_path, "Awkward", {"data": data, "optimizer": optimizer, "lr_scheduler": schedule})
    seen = bench(tmp_path, lambda made: (made.module.began, made.module.seen), config=[path])
    assert seen[0] == seen[1]
    began, others = seen[0]
    assert len(began) == len(others) == 2 * 4
    assert len(set(began)) == 1
    assert all(each == ([], [True] * 6) for each in others)
    assert results(tmp_path)["left_out"] == {}
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "out"}


@pytest.mark.slow
def test_schedules_may_ask_for_the_number_of_steps(tmp_path: Path) -> None:
    bench(tmp_path, config=[config(tmp_path, "Scheduled", max_steps=7)], rounds=1)
    assert results(tmp_path)["left_out"] == {}


@pytest.mark.slow
def test_if_ddp_fails_later_the_rounds_before_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench(tmp_path, config=[config(tmp_path, "FailsLater")], rounds=3)
    content = results(tmp_path)
    assert "OutOfMemoryError" in content["left_out"]["ddp"]
    assert len(content["systems"]) == 4
    assert "ddp has failed later: OutOfMemoryError" in " ".join(capfd.readouterr().out.split())


@pytest.mark.slow
def test_data_that_end_are_named(tmp_path: Path) -> None:
    data = {"data": {"class_path": f"{JOB}.RunsOut", "init_args": {"batches": 10}}}
    with pytest.raises(RuntimeError, match="its data ended before the turn did"):
        bench(tmp_path, config=[config(tmp_path, more=data, strategy="ddp")])


@pytest.mark.slow
def test_ctrl_c_gives_what_there_is(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "safusion_command", "bench", "--config", config(tmp_path), "--rounds", "500"]
    more = ["--systems", "ddp-bf16", "--calibrate", "false", "--output", "out"]
    with started([*command, *more], tmp_path / "log") as program:
        program.wait_for("round 2 of 500", 120.0)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all processes; torchrun passes it on as well
        program.wait_for("Settings, table and picture: out", 30.0)
    assert "Stopping after this step" in program.output
    assert "Nothing was simulated: calibrate is false" in program.output
    assert "Keep ddp" in program.output or "Take ddp-bf16" in program.output
    assert [row["system"] for row in results(tmp_path)["systems"]][2:] == ["ddp", "ddp-bf16"]


@pytest.mark.slow
def test_memory_of_a_row_is_given_back_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[str, weakref.ref[Any]]] = []
    alive: list[list[str]] = []  # before each turn
    turn, fit = benchmark.Bench.turn, benchmark.Bench._fit

    def watched_turn(self: benchmark.Bench, row: str, *args: Any, **kwargs: Any) -> Any:
        alive.append([name for name, each in kept if each() is not None])
        return turn(self, row, *args, **kwargs)

    def watched_fit(self: benchmark.Bench, strategy: DDPStrategy, *args: Any) -> None:
        fit(self, strategy, *args)
        kept.extend((type(each).__name__, weakref.ref(each)) for each in (strategy, *strategy.optimizers))

    monkeypatch.setattr(benchmark.Bench, "turn", watched_turn)
    monkeypatch.setattr(benchmark.Bench, "_fit", watched_fit)
    said = bench(tmp_path, lambda _: (alive, [name for name, _ in kept]), config=[config(tmp_path)], rounds=1)
    for before, names in said:
        assert {"SAFusionStrategy", "DDPStrategy", "AdamW"} <= set(names)
        assert before == [[]] * 4


@pytest.mark.slow
def test_the_strategy_of_the_user_is_a_row(tmp_path: Path) -> None:
    mine = {"class_path": "lightning_safusion.SAFusionStrategy", "init_args": {"density": 0.3, "static_graph": True}}
    bench(tmp_path, config=[config(tmp_path, strategy=mine)], rounds=1)
    content = results(tmp_path)
    assert content["baseline"] == "yours"
    assert "yours" in [row["system"] for row in content["systems"]]
    if content["best"] == "yours":
        assert yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["trainer"]["strategy"] == mine


@pytest.mark.slow
def test_a_sharded_model_has_rows_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = {"class_path": "lightning_safusion.SAFusionModelParallelStrategy", "init_args": {"replicate_size": 2}}
    path = config(tmp_path, model="ShardedNet", strategy=mine, devices=4, callbacks=[])
    sparse = "saf-hsdp[density=0.1,collective=allgather]"
    bench(tmp_path, config=[path], workers=4, rounds=1, systems=("hsdp-bf16", "powersgd", sparse))
    content = results(tmp_path)
    names = ["no-exchange", "barrier", "hsdp", "hsdp-bf16", sparse, "yours"]
    assert [row["system"] for row in content["systems"]] == names
    assert "a sharded model has none" in content["left_out"]["powersgd"]
    (sent,) = [row["bytes_sent"] for row in content["systems"] if row["system"] == sparse]
    assert 0 < sent < 0.3 * 4 * content["parameters"] / 2
    assert "hsdp" in capfd.readouterr().out


def test_a_file_with_the_section_fit_and_classes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"fit": {"trainer": {"max_steps": 5}, "model": {"width": 12}, "ckpt_path": None}}))

    def parse() -> Any:
        model = f"{JOB}.Net"
        job = parse_job(JobOptions(config=(str(path),), model=model, data=f"{JOB}.Data"))
        module, data = job.build()
        return module.net[0].out_features, data.batches, job.trainer["max_steps"]  # type: ignore[index, union-attr]

    assert run_alone(parse) == (12, 40, 5)


def test_several_files_other_subcommands_and_a_command_line_of_ones_own(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    options = {"process_group_backend": "gloo", "timeout": "0:05:00"}
    strategy = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": options}
    fit = {
        "trainer": {"max_steps": 5, "strategy": strategy},
        "model": {"class_path": f"{JOB}.Net", "init_args": {"optimizer": "Adam"}},
        "data": {"class_path": f"{JOB}.Data"},
    }
    first.write_text(yaml.safe_dump({"fit": fit, "test": {"data": {"class_path": "no.such.Data"}}}))
    more = {"class_path": f"{JOB}.Data", "init_args": {"batches": 12}}
    second.write_text(yaml.safe_dump({"fit": {"trainer": {"max_steps": 6}, "data": more}}))

    def parse() -> Any:
        both = (str(first), str(second))
        job = parse_job(JobOptions(config=both, cli=f"{JOB}:Linked"))
        module, data = job.build()
        width = module.net[0].out_features  # type: ignore[index, union-attr]
        return width, data.batches, job.trainer["max_steps"], module.optimizer, job.group, job.content["fit"]["trainer"]  # type: ignore[union-attr]

    width, batches, steps, optimizer, group, trainer = run_alone(parse)
    assert (width, batches, steps, optimizer) == (12, 12, 6, "Adam")
    assert group == {"process_group_backend": "gloo", "timeout": timedelta(minutes=5)}
    assert trainer["max_steps"] == 6
    assert trainer["strategy"]["init_args"] == options
    second.write_text("trainer: {max_steps: 6}")
    with pytest.raises(ValueError, match="some have a section fit"):
        read_files((str(first), str(second)))


def test_a_command_line_that_names_its_own_classes() -> None:
    configs = [
        ROOT / "examples/workloads/configs" / f"{name}.yaml" for name in ("lstm_wikitext2", "lstm_wikitext2_tiny")
    ]

    def parse(cli: str, *config: Path) -> Any:
        job = parse_job(JobOptions(config=tuple(map(str, config)), cli=cli))
        return job._cli.settings["model"], job.trainer["max_epochs"]

    model, _ = run_alone(parse, "examples.workloads.cli:WorkloadCLI", *configs)
    assert "lstm" in model["class_path"].lower()
    assert run_alone(parse, f"{JOB}:Named")[0]["width"] == 24
    with pytest.raises(RuntimeError, match="Asks must be a class that is made without arguments: .* 'name'"):
        run_alone(parse, f"{JOB}:Asks")


def test_a_shell_of_slurm_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    assert counted({"devices": "auto"}, None) == {"devices": "auto"}
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    assert counted({"devices": "auto"}, None) == {"devices": 1, "num_nodes": 1}


@pytest.mark.parametrize(
    ("environ", "machines", "message"),
    [
        ({}, 2, "the trainer has 2 machines, and nothing has started their processes"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "interactive"}, 1, "a Slurm job called 'interactive'"),
    ],
)
def test_processes_that_it_cannot_start_are_missed_at_once(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], machines: int, message: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    arguments = {"accelerator": "cpu", "devices": 2, "num_nodes": machines}
    with pytest.raises(ValueError, match=message), processes(arguments, JobOptions()):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": f"{JOB}:Nett"}, "has no 'Nett'. Did you mean 'Net'"),
        ({"model": "tests.tools.bench.no_job:Net"}, "there is no module 'tests.tools.bench.no_job'"),
        ({"model": f"{JOB}:Data"}, "is no LightningModule"),
        ({"config": ["no.yaml"]}, "there is no file no.yaml"),
        ({"data": f"{JOB}:Data"}, "a job needs a file"),
        ({"model": f"{JOB}:Net", "systems": ["sofusion"]}, "unknown system 'sofusion'"),
        ({"model": f"{JOB}:Net", "density": [2.0]}, "density is a share"),
        ({"model": f"{JOB}:Net", "block": 1}, "blocks of 2 steps"),
        ({"model": f"{JOB}:Net"}, "there is one worker, and nothing to exchange"),
        ({"minutes": 3.0}, "a job needs a file"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    def refused() -> str:
        with pytest.raises(ValueError, match=re.escape(message)) as failure:
            run_bench(output=tmp_path, **options)
        return str(failure.value)

    assert message in run_alone(refused)


def test_other_strategies_than_ddp_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="only jobs of DDP, SAFusionStrategy and SAFusionModelParallelStrategy"):
        bench(tmp_path, config=[config(tmp_path, strategy="fsdp")])


@pytest.mark.slow
def test_plainly_started_it_starts_the_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "safusion_command", "bench", "--config", config(tmp_path), "--rounds", "1"]
    more = ["--systems", "ddp-bf16", "--calibrate", "false", "--output", "here"]
    done = subprocess.run(
        [*command, *more], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Keep ddp" in done.stdout or "Take ddp-bf16" in done.stdout
    assert (tmp_path / "here" / "logs" / "process-1.log").exists()
    assert str(ROOT) not in done.stdout
