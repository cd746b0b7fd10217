"""Parts that cannot be used, or not as they are: every rank decides the same, none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_safusion.fusion.state import local_state
from lightning_safusion.integration import checkpoint
from lightning_safusion.integration.checkpoint.parts import dump
from tests.cluster import Cluster, settings
from tests.resume import part_file

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(params=["residual", "decoupled"])
def clusters(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, Cluster]]:
    made = [Cluster(2, lambda: settings(memory=request.param, collective="allgather")) for _ in range(2)]
    for step in range(3):
        made[0].step(made[0].random_grads(step))
    yield made[0], made[1]
    for cluster in made:
        cluster.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.ckpt"


def save(cluster: Cluster, path: Path) -> dict[str, Any]:
    text = cluster.settings[0].describe()
    return cluster.each(lambda rank: checkpoint.save(cluster.engines[rank], text, path))[0]


def restore(cluster: Cluster, entries: list[dict[str, Any]], path: Path) -> list[str]:
    text = cluster.settings[0].describe()
    first, second = cluster.each(lambda rank: checkpoint.restore(cluster.engines[rank], text, entries[rank], path))
    assert first == second
    return first


def residuals(cluster: Cluster, rank: int) -> dict[str, torch.Tensor]:
    return local_state(cluster.engines[rank])["memory"]["residual"]


def rewrite(path: Path, entry: dict[str, Any], rank: int, change: Change) -> None:
    """Changes a rank's part, and the digest in the entry with it, as a faulty program would have written both."""
    file = part_file(Path(f"{path}.safusion"), rank)
    part = torch.load(file, weights_only=True)
    changed = change(part)
    with open(file, "wb") as out:
        entry["digests"][rank] = dump(part if changed is None else changed, out)


def _set(*keys: str, value: Any) -> Change:
    def change(part: dict[str, Any]) -> None:
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value

    return change


CONTENT: dict[str, tuple[Change, str]] = {
    "no table": (lambda part: [part], "belongs to another checkpoint"),
    "no memory": (lambda part: part.pop("memory") and None, "'memory' is not a table"),
    "memory of another type": (_set("memory", value=[1.0]), "'memory' is not a table"),
    "field of another type": (_set("memory", "residual", value=3), "'memory' is not a table"),
    "a number": (_set("memory", "residual", "t0", value=1.0), "residual of t0 is float, not a dense tensor"),
    "complex": (_set("memory", "residual", "t0", value=torch.zeros(40, 30) * 1j), "residual of t0 is torch.complex64"),
    "integers": (_set("memory", "residual", "t0", value=torch.zeros(40, 30).int()), "residual of t0 is torch.int32"),
    "sparse": (_set("memory", "residual", "t0", value=torch.zeros(40, 30).to_sparse()), "torch.sparse_coo"),
    "numbered": (lambda part: part["memory"]["residual"].update({3: torch.zeros(2)}), "are not the names"),
    "another field": (_set("memory", "extra", value={}), "the parts have different fields"),
    "unstepped": (_set("unstepped", value=3), "'unstepped' is not a list"),
    "compressor": (_set("compressor", value=None), "'compressor' is not a state"),
    "rank": (_set("rank", value=0), "has rank 0, expected 1"),
    "workers": (_set("world_size", value=3), "has world_size 3, expected 2"),
    "format": (_set("format", value=7), "has format 7, expected 2"),
}


def test_content_that_cannot_be_used_is_refused_on_all_ranks(clusters: tuple[Cluster, Cluster], path: Path) -> None:
    saved, other = clusters
    for name, (change, problem) in CONTENT.items():
        entry = save(saved, path)
        checkpoint.sweep(path, entry["nonce"])
        rewrite(path, entry, 1, change)
        (note,) = restore(other, [entry, entry], path)
        assert problem in note, name
        assert "rank_00001" in note or name == "another field"
        assert not any(residual.any() for rank in range(2) for residual in residuals(other, rank).values())
        carries = saved.settings[0].memory.name == "decoupled"
        assert ("and the momentum, which the residuals carry" in note) == carries
        assert note.endswith("is lost")


def test_a_flipped_bit_anywhere_is_noticed(clusters: tuple[Cluster, Cluster], path: Path) -> None:
    saved, other = clusters
    entry = save(saved, path)
    file = part_file(Path(f"{path}.safusion"), 1)
    content = file.read_bytes()
    for place in range(0, len(content), len(content) // 40):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        (note,) = restore(other, [entry, entry], path)
        assert f"{file} is damaged: its digest" in note
    file.write_bytes(content)
    assert restore(other, [entry, entry], path) == []


def test_residuals_that_are_not_finite_are_refused_by_name(clusters: tuple[Cluster, Cluster], path: Path) -> None:
    saved, other = clusters
    for rank in range(2):
        residuals(saved, rank)["t3"].fill_(0.5)
    residuals(saved, 1)["t0"][3, 4] = float("nan")
    residuals(saved, 0)["t3"][0, 0, 0] = float("-inf")
    entry = save(saved, path)
    (note,) = restore(other, [entry, entry], path)
    assert "not finite are refused: t3 (rank 0), t0 (rank 1); these begin empty on all ranks" in note
    for rank in range(2):
        for name, residual in residuals(other, rank).items():
            before = residuals(saved, rank)[name]
            assert torch.equal(residual, torch.zeros_like(before) if name in ("t0", "t3") else before)


def test_shapes_that_one_rank_cannot_take_in_are_told_of_and_empty_on_all(
    clusters: tuple[Cluster, Cluster], path: Path
) -> None:
    saved, other = clusters
    entry = save(saved, path)
    rewrite(path, entry, 1, _set("memory", "residual", "t0", value=torch.ones(30, 40)))
    (note,) = restore(other, [entry, entry], path)
    assert "differ from what this job can take in: t0; these begin empty" in note
    for rank in range(2):
        assert not residuals(other, rank)["t0"].any()
        assert torch.equal(residuals(other, rank)["t6"], residuals(saved, rank)["t6"])


def test_another_part_takes_in_what_both_have_and_is_told_of(clusters: tuple[Cluster, Cluster], path: Path) -> None:
    saved, _ = clusters
    entry, memory = save(saved, path), saved.settings[0].memory
    for part, said, kept in (
        ({"compressor": "sidco"}, "the compressor was TopK(", True),
        ({"memory": "dgc"}, f"the memory was {type(memory).__name__} and is DGCMemory", False),
    ):
        parts = {"memory": memory.name, "collective": "allgather"} | part
        other = Cluster(2, lambda parts=parts: settings(**parts))
        assert said in restore(other, [entry, entry], path)[0]
        for engine in other.engines:
            assert (
                any(held.any() for field in local_state(engine)["memory"].values() for held in field.values()) is kept
            )
        other.close()


ENTRIES: dict[str, tuple[Change, str]] = {
    "engine": (lambda entry: entry.pop("engine") and None, "lacks 'engine'"),
    "plan": (lambda entry: entry["engine"].pop("planner") and None, "lacks 'planner' in 'engine'"),
    "another type": (_set("engine", value=3), "has 3 as 'engine'"),
    "windows": (_set("engine", "windows", value="many"), "has 'many' as 'windows' in 'engine'"),
    "negative": (_set("engine", "windows", value=-5), "has -5 as 'windows' in 'engine'"),
    "density": (_set("engine", "density", value=float("nan")), "has nan as 'density' in 'engine'"),
    "first windows": (_set("engine", "first_windows", value=[1]), "has [1] as 'first_windows' in 'engine'"),
    "tensors": (_set("engine", "tensors", value=[3, "t0"]), "has [3, 't0'] as 'tensors' in 'engine'"),
    "nonce": (_set("nonce", value="../../a"), "has '../../a' as 'nonce'"),
    "exchanges": (_set("engine", "exchanges", value=[3]), "cannot be restored: TypeError"),
    "format": (_set("format", value="new"), "has 'new' as 'format'"),
    "digests": (_set("digests", value=["0"]), "has 1 digests for 2 workers"),
    "a setting": (_set("settings", "memory", value={}), "has {} as 'memory' in 'settings'"),
    "settings": (_set("settings", value={}), "lacks 'compressor' in 'settings'"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_damaged_entry_is_an_error_on_all_ranks(clusters: tuple[Cluster, Cluster], path: Path, name: str) -> None:
    saved, other = clusters
    entry = save(saved, path)
    damaged = deepcopy(entry)
    change, problem = ENTRIES[name]
    change(damaged)
    text = other.settings[0].describe()

    def refused(rank: int) -> str:
        with pytest.raises(ValueError, match="the entry 'safusion' of .*a.ckpt is damaged") as caught:
            checkpoint.restore(other.engines[rank], text, (entry, damaged)[rank], path)
        return str(caught.value)

    first, second = other.each(refused)
    assert first == second
    assert f"on rank 1 it {problem}" in first
    assert "delete the entry" in first


def test_a_compressor_that_one_rank_cannot_restore_is_told_of(clusters: tuple[Cluster, Cluster], path: Path) -> None:
    saved, other = clusters
    entry = save(saved, path)
    rewrite(path, entry, 1, _set("compressor", value={"threshold": 3}))
    (note,) = restore(other, [entry, entry], path)
    assert "the compressor of rank 1 begins anew: TopK keeps no state" in note
