"""What a user installs: the metadata, and the promise that types and the licence come along."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_safusion
from lightning_safusion.__about__ import __version__
from lightning_safusion.sparsify import Segments
from tests.packaging.environments import run

ROOT = Path(__file__).parents[2]
PACKAGE = Path(lightning_safusion.__file__).parent


@pytest.fixture(scope="module")
def metadata() -> importlib.metadata.PackageMetadata:
    return importlib.metadata.metadata("lightning-safusion")


def test_metadata(metadata: importlib.metadata.PackageMetadata) -> None:
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cli", "plot", "examples", "docs", "test"}


def _built(folder: Path, home: str) -> Message:
    """The metadata of a wheel, as it is built of this tree."""
    tree = folder / "tree"
    shutil.copytree(PACKAGE, tree / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.so.*"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "safusion_command.py"):
        shutil.copy(ROOT / name, tree)
    build = "from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare; prepare('..')"
    run(sys.executable, "-c", build, cwd=tree, SAFUSION_URL=home)
    (path,) = folder.glob("*.dist-info/METADATA")
    return message_from_string(path.read_text(encoding="utf-8"))


def test_links_of_an_index_page_lead_to_the_repository(tmp_path: Path) -> None:
    home = "https://forge.example/somebody/safusion"
    built = _built(tmp_path, f"{home}/")
    assert built["Description-Content-Type"] == "text/markdown"
    text = str(built.get_payload())
    targets = re.findall(r"\]\((.*?)\)", text)
    assert len(targets) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text(encoding="utf-8"))) > 30
    assert all(target.startswith("https://") for target in targets)
    begin = re.compile(rf"{home}/(blob|raw)/v{__version__}/([\w./]+)")
    ours = {found[2]: found[1] for target in targets if (found := begin.match(target))}
    assert len(ours) > 15
    assert {path for path in ours if not (ROOT / path).is_file()} == set()
    raw = {path for path, kind in ours.items() if kind == "raw"}
    assert raw == {"docs/images/steps.svg", "docs/images/mechanism.svg"}
    assert f"({home}/blob/v{__version__}/README.md#papers)" in text
    urls = dict(line.split(", ") for line in built.get_all("Project-URL", []))
    assert {"Source", "Documentation", "Changelog", "Paper: SAFusion", "Paper: ADTopk"} == urls.keys()
    assert urls["Source"] == home
    assert urls["Changelog"] == f"{home}/blob/v{__version__}/CHANGELOG.md"


def test_without_a_repository_the_readme_is_taken_as_it_is(tmp_path: Path) -> None:
    built = _built(tmp_path, "")
    assert str(built.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    urls = dict(line.split(", ") for line in built.get_all("Project-URL", []))
    assert urls.keys() == {"Paper: SAFusion", "Paper: ADTopk"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert all(url.removeprefix("https://doi.org/") in citation for url in urls.values())


def test_the_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="safusion")
    assert [script.value for script in scripts] == ["safusion_command:main"]
    (script,) = scripts
    assert callable(script.load())


def test_all_that_is_no_module_is_shipped() -> None:
    (patterns,) = re.findall(r"^lightning_safusion = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    shipped = {path for pattern in re.findall('"(.*?)"', patterns) for path in PACKAGE.glob(pattern)}
    assert PACKAGE / "py.typed" in shipped
    templates = set((PACKAGE / "tools" / "report" / "templates").iterdir())
    assert templates
    assert templates <= shipped


def test_every_direct_dependency_is_pinned_for_the_tests(metadata: importlib.metadata.PackageMetadata) -> None:
    # CUDA builds of torch pin a Triton of their own
    requirements = [name for name in metadata.get_all("Requires-Dist", []) if not name.startswith("triton")]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]  # every requirement begins with a name
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert names - {"lightning-safusion"} == pinned


def test_the_compressor_of_the_guide_works() -> None:
    (source,) = re.findall(
        r"```python\n(import numpy.*?)```", (ROOT / "docs" / "guide" / "compressors.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102 - the very text that readers copy
    segments = Segments(np.array([0, 4, 10]), np.array([1, 3]), ("a", "b"), ((4,), (6,)))
    selection = names["FirstK"]().select(torch.arange(10.0), segments, step=0)
    assert selection.indices.tolist() == [0, 4, 5, 6]
    assert selection.values.tolist() == [0.0, 4.0, 5.0, 6.0]
