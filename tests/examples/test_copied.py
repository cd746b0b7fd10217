"""Examples need nothing that is not copied with them. One is run so; the others are run elsewhere.

The quickstart in tests/packaging, those of Slurm in tests/e2e, ``cli.py`` and ``ddp_script.py`` in ``test_cli.py``,
``plain_torch.py`` in tests/integration.
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
from tests.process_group import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARDED = ("sharded.py", "model_parallel.py")
LOOPS = ("fabric.py", "accelerate_loop.py", "transformers_trainer.py", *SHARDED)
ALONE = ("quickstart.py", "cli.py", "slurm/train.py", "hugging_face.py", "plain_torch.py", "ddp_script.py", *LOOPS)
ROWS = re.findall(r"^\| \[`([\w./]+)`\].*\| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ALONE)
def test_it_imports_nothing_that_is_not_copied_with_it(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = {module for module in imported if module.partition(".")[0] in ("lightning_safusion", "examples", "lab")}
    assert ours <= {"lightning_safusion", "lightning_safusion.hugging_face"}  # no room of it either: what is public


def test_the_readme_has_a_command_for_each() -> None:
    assert set(ALONE) <= dict(ROWS).keys()


def started(name: str, folder: Path) -> str:
    """What a script in a folder prints, started with the command of the readme."""
    command = shlex.split(dict(ROWS)[name])
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[command[0]]
    both = f"{shlex.join([sys.executable, *launcher, *command[1:]])} 2>&1"
    return run("bash", "-c", both, cwd=folder, PYTHONPATH=str(EXAMPLES.parent), OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_one_runs_alone_with_the_command_of_the_readme(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "hugging_face.py", tmp_path)
    printed = started("hugging_face.py", tmp_path)
    assert re.search(r"^accuracy (0\.9|1\.0)", printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_and_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Its residuals are used in full, and a training that is complete ends without an error."""
    text = (EXAMPLES / name).read_text()
    first = re.sub(r"^(EPOCHS, CHECKPOINTS? = )\d", r"\g<1>2", text, count=1, flags=re.MULTILINE)
    assert first != text
    (tmp_path / name).write_text(first)
    printed = [started(name, tmp_path)]
    (tmp_path / name).write_text(text)
    for _ in range(2):
        printed.append("".join(run_script(tmp_path / name, tmp_path, 4 if name in SHARDED else 2)))
    goes_on = r"goes on (after|from) |Restored all states from the checkpoint"
    assert [re.search(goes_on, each) is not None for each in printed] == [False, True, True], printed[0]
    assert re.search(r"accuracy (0\.9|1\.0)\d*(, |\n)\d+ bytes in the last step", printed[1]), printed[1]
    assert "resumes with differences" not in printed[1]
