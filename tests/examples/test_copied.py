"""Examples run copied into an empty folder, with the commands of their README (tests/e2e has Slurm's)."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import run

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = ("quickstart.py", "cli.py", "slurm/train.py", "hugging_face.py", "ddp_script.py")
ROWS = re.findall(r"^\| \[`([\w./]+)`\].*\| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
#: A shorter training than the command's.
SHORTER = {"slurm/train.py": "--steps 40", "cli.py": "--trainer.max_steps=6 --trainer.limit_train_batches=3"}
PRINTED = {
    "quickstart.py": r"^loss 0\.0",
    "cli.py": "",
    "slurm/train.py": r"^step 40: loss ",
    "hugging_face.py": r"^accuracy 0\.9",
    "ddp_script.py": r"^accuracy 0\.[89]",
}


@pytest.mark.parametrize("name", ALONE)
def test_it_imports_nothing_that_is_not_copied_with_it(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = {module for module in imported if module.partition(".")[0] in ("lightning_safusion", "examples", "lab")}
    assert ours <= {"lightning_safusion"}  # no room of it either: only its public names


def test_the_readme_has_a_command_for_each() -> None:
    assert set(ALONE) <= dict(ROWS).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_it_runs_alone(name: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / name, tmp_path)
    command = shlex.split(f"{dict(ROWS)[name]} {SHORTER.get(name, '')}")
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    printed = run(*launcher[command[0]], *command[1:], cwd=tmp_path)
    assert re.search(PRINTED[name], printed, re.MULTILINE), printed
