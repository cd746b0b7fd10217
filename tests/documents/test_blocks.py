"""Every YAML block is a configuration whose strategy can be built, every Python block compiles, and what it imports
and builds exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

import lightning_safusion
from lightning_safusion import SAFusionModelParallelStrategy, SAFusionStrategy
from tests.documents.pages import PAGES, blocks, name

PYTHON = [pytest.param(text, id=f"{name(page)}-{n}") for page in PAGES for n, text in enumerate(blocks(page, "python"))]
YAML = [pytest.param(text, id=f"{name(page)}-{n}") for page in PAGES for n, text in enumerate(blocks(page, "yaml"))]


class Parsed(LightningCLI):
    """Reads a configuration and builds its classes, but no trainer: that may need a GPU."""

    def instantiate_classes(self) -> None:
        """The classes."""
        self.config_init = self.parser.instantiate_classes(self.config)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None: ...


@pytest.mark.parametrize("text", YAML)
def test_yaml_is_a_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    args = ["--config", str(tmp_path / "config.yaml")]
    parsed = Parsed(BoringModel, args=args, run=False, save_config_callback=None)
    strategy = parsed.config_init.trainer.strategy
    ours = SAFusionStrategy | SAFusionModelParallelStrategy
    assert isinstance(strategy, ours) or strategy in StrategyRegistry.available_strategies()


@pytest.mark.parametrize("text", PYTHON)
def test_python_compiles_and_its_imports_exist(text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("text", PYTHON)
def test_strategies_of_the_blocks_can_be_built(text: str) -> None:
    public = {key: getattr(lightning_safusion, key) for key in lightning_safusion.__all__}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for call in (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "SAFusionStrategy"):
        if not any(keyword.arg == "transport" for keyword in call.keywords):  # Horovod need not be there
            eval(ast.unparse(call), dict(public))  # noqa: S307 - the very text that readers copy


def test_there_are_blocks() -> None:
    assert len(PYTHON) > 10
    assert YAML
