"""Parts of other packages: they are found by name, train as our own do, and break nothing where they are broken."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import Strategy

from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.sparsify import available_sparsifiers, resolve_memory, resolve_sparsifier
from lightning_safusion.systems import resolve_system
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.plan.rows import simulated_row
from safusion_command import main
from tests.cluster import Cluster, assert_conserved, settings
from tests.models import TinyClassifier, distance, equal, fit
from tests.packaging.environments import run
from tests.plugins import install
from tests.process_group import run_launched

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
OFFERED = {
    "compressors": {"stride": "my_plugin:Stride"},
    "memories": {"halved": "my_plugin:Halved"},
    "groupings": {"halves": "my_plugin:Halves"},
    "collectives": {"plain": "my_plugin:PLAIN"},
    "systems": {"mine": "my_plugin:MINE"},
}
KINDS: dict[str, Callable[[str], object]] = {
    "compressors": resolve_sparsifier,
    "memories": resolve_memory,
    "groupings": resolve_fusion,
    "collectives": find_collective,
    "systems": resolve_system,
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The example package, as pip installs it."""
    install(monkeypatch, tmp_path, OFFERED, (EXAMPLE / "my_plugin.py").read_text(encoding="utf-8"), "my_plugin")


def fit_three(rank: int) -> list[Any]:
    options = {"max_steps": 12, "limit_train_batches": 12}
    ways: list[Any] = ["ddp", SAFusionStrategy(system="mine", density=1.0), SAFusionStrategy("stride", system="mine")]
    fitted = []
    for strategy in ways:
        seed_everything(0, verbose=False)
        fitted.append(fit(strategy, TinyClassifier(), **options))
    return fitted


@pytest.mark.usefixtures("example")
def test_a_package_of_parts_trains() -> None:
    """At density 1 it gives what DDP gives; below, replicas stay equal and a tenth is sent."""
    (plain, whole, sparse), (_, _, other) = run_launched(2, fit_three)
    assert whole.figures["plain_ddp"] is None
    assert whole.figures["system"] == "mine"
    assert len(whole.figures["plan"]) == 2
    assert distance(plain.weights, whole.weights) <= 1e-6
    assert equal(sparse.weights, other.weights)
    assert sparse.figures["bytes_sent"] < 0.3 * whole.figures["bytes_sent"]
    assert sum(sparse.losses[-4:]) < sum(sparse.losses[:4])


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("wire", ["auto", "q4"])
def test_its_collective_loses_nothing(wire: str) -> None:
    cluster = Cluster(3, lambda: settings(collective="plain", density=0.05, wire=wire))
    assert_conserved(cluster)
    cluster.close()


@pytest.mark.usefixtures("example")
def test_its_system_is_a_row_of_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["systems"])
    assert "mine" in capsys.readouterr().out
    assert simulated_row("mine[density=0.1]").parts.system.summary.startswith("before fusion")
    assert parse_row("mine[wire=bf16]").strategy(0.1).settings.fusion.name == "halves"
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    given = {"class_path": "lightning_safusion.SAFusionStrategy", "init_args": {"system": "mine", "memory": "halved"}}
    assert parser.instantiate_classes(parser.parse_object({"strategy": given})).strategy.system == "mine"
    with pytest.raises(ValueError, match="Did you mean 'mine'"):
        resolve_system("Mine")


def test_names_are_known_without_importing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, {"systems": {"gone": "no_such_module:ROW"}, "compressors": {"gone": "nothing:X"}})
    main(["systems"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "gone" in printed
    assert "plugged 1.2" in printed
    assert available_sparsifiers()[-1] == "gone"
    SAFusionStrategy()  # who does not use it is not concerned


@pytest.mark.parametrize("group", KINDS)
def test_a_broken_entry_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str) -> None:
    source = "class Needs:\n    def __init__(self, needed): ...\n\nTEXT = 'text'\n"
    entries = {"gone": "nowhere:Part", "missing": "plugged:Part", "needs": "plugged:Needs", "text": "plugged:TEXT"}
    install(monkeypatch, tmp_path, {group: entries}, source)
    for name, error, told in [
        ("gone", RuntimeError, r"plugged 1\.2 \(nowhere:Part\) cannot be loaded: ModuleNotFoundError: .*'nowhere'"),
        ("missing", RuntimeError, r"plugged 1\.2 \(plugged:Part\) cannot be loaded: AttributeError: .*Part"),
        ("needs", RuntimeError, r"plugged 1\.2 \(plugged:Needs\) cannot be loaded: TypeError: .*'needed'"),
        ("text", TypeError, r"plugged 1\.2 \(plugged:TEXT\) is 'text', which is no "),
    ]:
        with pytest.raises(error, match=f"{name}' of {told}"):
            KINDS[group](name)


def test_an_entry_that_ends_the_process_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, {"memories": {"ends": "ends:Part"}}, "raise SystemExit('no licence')", "ends")
    with pytest.raises(RuntimeError, match=r"ends 1\.2 \(ends:Part\) cannot be loaded: SystemExit: no licence"):
        resolve_memory("ends")


@pytest.mark.parametrize("group", KINDS)
def test_a_package_cannot_replace_a_part_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str) -> None:
    own = {"compressors": "topk", "memories": "residual", "groupings": "aligned", "collectives": "auto"}
    name = own.get(group, "ddp")
    install(monkeypatch, tmp_path, {group: {name: "nowhere:Part"}})
    assert KINDS[group](name)


def test_a_name_of_two_packages_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("first", "second"):
        install(monkeypatch, tmp_path, {"memories": {"twice": f"{package}:Part"}}, package=package)
    with pytest.raises(ValueError, match=r"offered twice, by second 1\.2 .* and first 1\.2 .*: uninstall one"):
        resolve_memory("twice")


@pytest.mark.slow
def test_the_example_is_installed_and_passes_its_own_tests(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "plugin")
    words = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", "installed", "./plugin"]
    run(sys.executable, "-m", "pip", "install", *words, cwd=tmp_path)
    paths = f"{tmp_path / 'installed'}:{EXAMPLE.parents[1]}"
    assert "3 passed" in run(sys.executable, "-m", "pytest", "-q", "plugin", cwd=tmp_path, PYTHONPATH=paths)
