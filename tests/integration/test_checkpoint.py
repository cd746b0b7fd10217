"""Residuals, counters and tuner state in the checkpoints of real trainers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_safusion import (
    ADTopk,
    Aligned,
    DGCMemory,
    LinearRamp,
    OkTopk,
    ResidualMemory,
    SAFusionStrategy,
    Selective,
    SIDCo,
)
from tests.models import TinyClassifier, classification, equal, trainer
from tests.process_group import run_ranks
from tests.resume import InGroup, StepModel, held_back, mass, parameters, part_file, run, saving

SPARSE = {"density": 0.1, "collective": "allgather", "dense_below": 0}
SMALL = {"fusion": Aligned(3)}
JOBS: dict[str, dict[str, Any]] = {
    "topk": SPARSE | {"compressor": "topk"},
    "auto": {"density": 0.05},
    "pooled": SPARSE | SMALL | {"compressor": "topk", "quota": "pooled"},
    "shared": SPARSE | SMALL | {"compressor": "topk", "quota": "shared"},
    "behind": SPARSE | {"system": "behind"},
    "gaussiank": SPARSE | {"compressor": "gaussiank", "wire": "bf16"},
    "sidco": SPARSE | SMALL | {"compressor": SIDCo("gpareto", 1, 0.25, True, True, 3, 0.01), "scope": "group"},
    "oktopk": SPARSE | {"compressor": OkTopk(refresh=5)},
    "oktopk all-reduce": {"density": 0.1, "system": "oktopk"},
    "gtopk": {"density": 0.1, "system": "gtopk"},
    "sharded": {"density": 0.1, "collective": "sharded"},
    "hierarchical": {"density": 0.1, "collective": "hierarchical"},
    "hierarchical-sharded": {"density": 0.1, "collective": "hierarchical-sharded"},
    "randomk": SPARSE | {"compressor": "randomk"},
    "naive": SPARSE | {"system": "saf-naive"},
    "horovod": SPARSE | {"system": "horovod"},
    "mgwfbp": {"system": "mgwfbp"},
    "omgs": SPARSE | {"system": "omgs"},
    "cupcake": SPARSE | {"system": "cupcake"},
    "adtopk": {"system": "adtopk", "compressor": ADTopk(interleave=True), "collective": "hybrid"},
    "ssfusion": {"system": "ssfusion", "fusion": Selective(3)},
    "dgc": SPARSE | {"compressor": "dgc", "memory": DGCMemory(clip=1.0)},
    "decoupled": SPARSE | {"memory": "decoupled"},
    "ef21": SPARSE | {"memory": "ef21"},
    "none": SPARSE | {"memory": "none"},
    "ramp": SPARSE | SMALL | {"density": LinearRamp(0.3, 0.05, 7), "quota": "pooled"},
    "unused": SPARSE | {"find_unused_parameters": True},
}
QUICK = ("ddp", "auto", "shared", "sharded", "decoupled")
OTHERS = tuple(name for name in JOBS if name not in QUICK)


def ours(**options: Any) -> SAFusionStrategy:
    """A strategy for the process group at hand; its parts keep state, so each gets its own."""
    return SAFusionStrategy(cluster_environment=InNodes(), process_group_backend="gloo", **deepcopy(SPARSE | options))


class InNodes(InGroup):
    """The last two of three processes share a machine, and no others."""

    def node_rank(self) -> int:
        return min(self.global_rank(), 1)


def ddp() -> DDPStrategy:
    return DDPStrategy(cluster_environment=InGroup(), process_group_backend="gloo")


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What the strategy warns of; filled at the end."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if "SAFusionStrategy" in str(each.message)]


# --- resuming -------------------------------------------------------------------------------------------------------


def _resume_all(rank: int, folder: Path, names: Sequence[str]) -> dict[str, tuple[bool, bool]]:
    results = {}
    for name in names:
        options = None if name == "ddp" else JOBS[name]

        def fresh(options: Any = options) -> Any:
            return ddp() if options is None else ours(**({"collective": None, "dense_below": None} | options))

        momentum = 0.0 if name in ("decoupled", "dgc", "ef21") else 0.9
        path = folder / f"{name}.ckpt"
        whole = run(fresh(), 9, saving(path, 4), model=StepModel(momentum), deterministic=True)
        resumed = run(fresh(), 9, ckpt=path, model=StepModel(momentum), deterministic=True)
        middle = list(torch.load(path, weights_only=True)["state_dict"].values())
        results[name] = equal(parameters(whole), parameters(resumed)), equal(parameters(whole), middle)
    return results


@pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="few"), pytest.param(OTHERS, marks=pytest.mark.slow, id="others")]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, names: Sequence[str]) -> None:
    for results in run_ranks(2, _resume_all, tmp_path, names, timeout=120):
        assert [name for name, (same, _) in results.items() if not same] == []
        assert [name for name, (_, untrained) in results.items() if untrained] == []


def _continue(
    rank: int, earlier: Path | None, path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> dict[str, Any]:
    """Saves at once what an earlier checkpoint becomes on this number of workers, or after 3 steps without one."""
    steps = 3 if earlier is None else 4
    with complaints() as warned:
        job = run(ours(**options), steps, saving(path, 3), ckpt=earlier)
    said = [text.partition(" was saved by ")[2].partition(":")[0] for text in caplog.messages]
    return {"warnings": warned, "told": list(filter(None, said)), "parameters": parameters(job)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all-gather"),
        pytest.param(JOBS["sharded"], id="shards", marks=pytest.mark.slow),
        pytest.param(JOBS["hierarchical-sharded"], id="shards of nodes"),
    ],
)
def test_residuals_survive_other_numbers_of_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    paths: list[Path | None] = [None, *(tmp_path / f"{i}.ckpt" for i in range(3))]
    masses, told = [], []
    caplog.set_level("INFO")
    for earlier, path, world_size in zip(paths, paths[1:], (2, 1, 3), strict=False):
        results = run_ranks(world_size, _continue, earlier, path, options, caplog)
        assert [r["warnings"] for r in results] == [[]] * world_size
        assert all(equal(results[0]["parameters"], r["parameters"]) for r in results)
        masses.append(mass(Path(f"{path}.safusion"), world_size))
        told.append([text for result in results for text in result["told"]])
    assert told == [[], ["2 workers and is resumed by 1"], ["1 worker and is resumed by 3"]]
    for name, first in masses[0].items():
        assert first.abs().max() > 0 or first.numel() < 10
        for later in masses[1:]:
            torch.testing.assert_close(later[name], first, rtol=0, atol=1e-6 * float(first.abs().max()))


def _sent_dense(rank: int, path: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    first = run(ours(**options), 4, saving(folder / "after.ckpt", 4), ckpt=path, model=StepModel(momentum=0.0))
    plain = run(ddp(), 4, ckpt=path, model=StepModel(momentum=0.0))
    # that checkpoint has no residual, so that the next job needs no engine
    last = run(ours(**options), 5, ckpt=folder / "after.ckpt", model=StepModel(momentum=0.0))
    names = [name for name, _ in first.lightning_module.named_parameters()]
    step = {n: a - b for n, a, b in zip(names, parameters(first), parameters(plain), strict=True)}
    return {"step": step, "reasons": [job.strategy.figures()["plain_ddp"] for job in (first, last)]}


def _share_a_memory(rank: int) -> bool:
    memory = ResidualMemory()
    group = {"cluster_environment": InGroup(), "process_group_backend": "gloo"}
    first, second = (SAFusionStrategy(**group, **SPARSE, memory=memory) for _ in range(2))
    run(first, 3)
    held = first.settings.memory.state_dict()["residual"].clone()
    run(second, 2)
    return bool(held.any()) and torch.equal(first.settings.memory.state_dict()["residual"], held)


def test_two_strategies_that_are_given_one_memory_have_residuals_of_their_own() -> None:
    assert run_ranks(2, _share_a_memory) == [True, True]


def _three_steps(rank: int, path: Path) -> None:
    run(ours(), 3, saving(path, 3), model=StepModel(momentum=0.0))


@pytest.mark.parametrize(
    ("world_size", "options", "reason"),
    [
        (1, {}, "there is one worker, and nothing to exchange"),
        (2, {"density": 1.0, "collective": "auto"}, "everything is sent (density 1)"),
    ],
)
def test_where_all_is_sent_the_residual_is_applied_once(
    tmp_path: Path, world_size: int, options: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "two.ckpt"
    run_ranks(2, _three_steps, path)
    held = mass(Path(f"{path}.safusion"), 2)
    for rank, result in enumerate(run_ranks(world_size, _sent_dense, path, tmp_path, options)):
        for name, difference in result["step"].items():
            torch.testing.assert_close(difference, -0.05 * held[name].float(), rtol=1e-4, atol=1e-6)
        assert not any(tensor.any() for tensor in held_back(tmp_path / "after.ckpt.safusion", rank).values())
        assert result["reasons"] == [None, reason]


def _save_one(rank: int, folder: Path) -> None:
    run(ours(), 4, saving(folder / "a.ckpt", 3))


# --- Lightning's ways with checkpoints ------------------------------------------------------------------------------


def _pruning(rank: int, folder: Path) -> list[str]:
    options = {"monitor": "step", "mode": "max", "every_n_train_steps": 1}
    run(ours(), 4, ModelCheckpoint(folder, "{step}", save_top_k=2, save_last="link", **options))
    link = folder / "last.ckpt"
    with complaints() as said:
        job = run(ours(), 5, ckpt=link)
    assert link.is_symlink()
    assert job.strategy.figures()["windows"] == 5
    return said


def test_pruning_takes_side_files_along_and_links_lead_to_them(tmp_path: Path) -> None:
    assert run_ranks(2, _pruning, tmp_path) == [[], []]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "last.ckpt",
        "step=3.ckpt",
        "step=3.ckpt.safusion",
        "step=4.ckpt",
        "step=4.ckpt.safusion",
    ]
    sides = sorted(p.name for p in (tmp_path / "step=4.ckpt.safusion").iterdir())
    nonce = torch.load(tmp_path / "step=4.ckpt", weights_only=True)["safusion"]["nonce"]
    assert sides == [f"rank_00000-{nonce}.pt", f"rank_00001-{nonce}.pt"]


def _kinds(rank: int, folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with complaints() as said:
        callback = ModelCheckpoint(folder, filename="every", every_n_train_steps=2, save_last=True)
        job = run(ours(), 4, callback, deterministic=True)
        job.save_checkpoint(folder / "ended.ckpt")  # after the strategy's teardown
        run(ours(), 4, saving(folder / "async.ckpt", 2), plugins=[AsyncCheckpointIO()], deterministic=True)
        job.save_checkpoint(folder / "stale.ckpt")
        job.save_checkpoint(folder / "stale.ckpt", weights_only=True)
        whole = parameters(run(ours(), 6, deterministic=True))
        for name in ("last", "ended", "async"):
            facts[name] = equal(whole, parameters(run(ours(), 6, ckpt=folder / f"{name}.ckpt", deterministic=True)))
        job.validate(ckpt_path=folder / "last.ckpt", verbose=False)
        plain = run(ddp(), 3, saving(folder / "plain.ckpt", 2), deterministic=True)
        facts["ours from ddp"] = run(ours(), 4, ckpt=folder / "plain.ckpt").strategy.figures()["windows"]
        facts["ddp from ours"] = run(ddp(), 5, ckpt=folder / "last.ckpt").global_step
        search = LearningRateFinder(num_training_steps=3, update_attr=False, early_stop_threshold=None)
        searched = run(ours(), 6, search, deterministic=True, default_root_dir=folder)
        facts["search"] = equal(whole, parameters(searched)), searched.strategy.figures()["windows"]
    facts["differs from ddp"] = not equal(whole, parameters(plain))
    facts["complaints"] = said
    return facts


def test_every_kind_of_checkpoint_resumes(tmp_path: Path) -> None:
    for facts in run_ranks(2, _kinds, tmp_path, timeout=120):
        assert facts == {
            "last": True,
            "ended": True,
            "async": True,
            "ours from ddp": 2,
            "ddp from ours": 5,
            "search": (True, 6),
            "differs from ddp": True,
            "complaints": [],
        }
    assert {p.name for p in tmp_path.glob("*.safusion")} == {
        f"{name}.ckpt.safusion" for name in ("every", "last", "ended", "async")
    }
    assert "safusion" not in torch.load(tmp_path / "stale.ckpt", weights_only=True)


def test_versions_of_modules_are_saved(tmp_path: Path) -> None:
    job = trainer(SAFusionStrategy(), devices=1, max_steps=1)
    job.fit(TinyClassifier(), classification())
    job.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert vars(saved) == vars(job.lightning_module.state_dict())
    assert "version" in vars(saved)["_metadata"][""]


@pytest.mark.slow
def test_a_checkpoint_opens_without_this_package(tmp_path: Path) -> None:
    run_ranks(2, _save_one, tmp_path)
    program = f"""
import sys, torch
entry = torch.load({str(tmp_path / "a.ckpt")!r}, weights_only=True)["safusion"]
side = torch.load({str(part_file(tmp_path / "a.ckpt.safusion", 1))!r}, weights_only=True)
assert entry["nonce"] == side["nonce"] and entry["world_size"] == 2 and entry["engine"]["windows"] == 3
assert side["memory"]["residual"]["conv.weight"].shape == (8, 3, 3, 3)
assert not any(name.startswith("lightning") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)
