"""Examples need nothing that is not copied with them. One is run so; the others are run elsewhere.

The quickstart in tests/packaging, those of Slurm in tests/e2e, ``cli.py`` and ``ddp_script.py`` in ``test_cli.py``.
"""

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
ALONE = ("quickstart.py", "cli.py", "slurm/train.py", "hugging_face.py", "plain_torch.py", "ddp_script.py")
ROWS = re.findall(r"^\| \[`([\w./]+)`\].*\| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)


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
def test_one_runs_alone_with_the_command_of_the_readme(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "hugging_face.py", tmp_path)
    command = shlex.split(dict(ROWS)["hugging_face.py"])
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    printed = run(*launcher[command[0]], *command[1:], cwd=tmp_path)
    assert re.search(r"^accuracy 0\.9", printed, re.MULTILINE), printed
