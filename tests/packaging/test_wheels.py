"""What a release uploads: built, looked into, and installed where nothing else of this package is."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_safusion.__about__ import __version__
from lightning_safusion.kernels.cpu.library import VERSION
from tests.packaging.environments import ROOT, build, clean_environment, extras_of, install, needs, run, unpack

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="wheels are built on Linux")]
LIBRARY = f"lightning_safusion/kernels/cpu/libkernels.so.{VERSION}"
MACHINES = [name for name in ("x86_64", "aarch64") if shutil.which(f"{name}-linux-gnu-gcc")]

#: Lines of the documents that install the package; a name stands for the wheel, with its extras.
INSTALL = re.compile(r'pip install (?:-e )?"?(?:lightning-safusion|\.|dist/[^"\[]*\.whl)?\[([\w,]+)\]"?')
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
NAMED = [found for path in DOCUMENTS for found in INSTALL.findall(path.read_text())]
EXTRAS = sorted({"", *(",".join(sorted(found.split(","))) for found in NAMED)})  # in whatever order they are named


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs(f"{platform.machine()}-linux-gnu-gcc")
    folder = tmp_path_factory.mktemp("dist")
    build(folder, *MACHINES)
    return folder


def test_there_is_a_wheel_for_each_platform_and_one_for_all(built: Path) -> None:
    begin = f"lightning_safusion-{__version__}"
    native = {f"{begin}-py3-none-manylinux_2_17_{machine}.whl" for machine in MACHINES}
    assert {path.name for path in built.iterdir()} == {*native, f"{begin}-py3-none-any.whl", f"{begin}.tar.gz"}
    for path in built.glob("*.whl"):
        with zipfile.ZipFile(path) as packed:
            names = packed.namelist()
        assert (LIBRARY in names) == (path.name in native)
        assert {"safusion_command.py", "lightning_safusion/py.typed"} <= set(names)
        tops = {name.partition("/")[0] for name in names}
        assert tops == {"lightning_safusion", "safusion_command.py", f"{begin}.dist-info"}
        assert not [name for name in names if name.endswith((".c", ".h"))]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_the_sdist_has_all_that_git_has(built: Path, tmp_path: Path) -> None:
    tree = unpack(built / f"lightning_safusion-{__version__}.tar.gz", tmp_path)
    tracked = set(run("git", "-C", ROOT, "ls-files").split())
    shipped = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert {name for name in tracked if (ROOT / name).exists()} <= shipped
    extra = {name for name in shipped - tracked if ".egg-info/" not in name}
    untracked = set(run("git", "-C", ROOT, "ls-files", "--others").split())
    assert extra - untracked == {"PKG-INFO", "setup.cfg"}


def test_the_sdist_passes_tests_of_its_own(built: Path, tmp_path: Path) -> None:
    tree = unpack(built / f"lightning_safusion-{__version__}.tar.gz", tmp_path)
    # all are found, slow ones too: what a module needs when it is imported was shipped
    collected = run(sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", cwd=tree)
    files = {line.partition("::")[0] for line in collected.splitlines() if "::" in line}
    assert files == {str(path.relative_to(tree)) for path in tree.rglob("tests/**/test_*.py")}
    chosen = ["tests/packaging", "tests/test_settings.py", "tests/lab/test_formats.py", "tests/contributing"]
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    printed = run(sys.executable, "-m", "pytest", *options, *chosen, cwd=tree)
    assert re.search(r"\d+ passed", printed)


def test_both_processors_compute_the_same(built: Path, tmp_path: Path) -> None:
    """Replicas stay equal where some workers have ARM processors: bits of results, of compiled functions."""
    needs("qemu-aarch64", "aarch64-linux-gnu-gcc", "x86_64-linux-gnu-gcc")
    printed = {}
    for machine in ("x86_64", "aarch64"):
        (wheel,) = built.glob(f"*{machine}.whl")
        with zipfile.ZipFile(wheel) as packed:
            library = packed.extract(LIBRARY, tmp_path / machine)
        program = tmp_path / f"{machine}.out"
        source = ROOT / "tests" / "packaging" / "kernels.c"
        run(f"{machine}-linux-gnu-gcc", "-O2", "-ffp-contract=off", source, "-o", program, "-ldl")
        under = () if machine == platform.machine() else (f"qemu-{machine}", "-L", f"/usr/{machine}-linux-gnu")
        printed[machine] = run(*under, program, library)
    assert len(set(printed["x86_64"].split("\n"))) > 10
    assert "bad" not in printed["x86_64"]
    assert printed["x86_64"] == printed["aarch64"]


def test_there_are_install_lines() -> None:
    assert {"examples", "examples,plot"} <= set(EXTRAS)


@pytest.mark.parametrize("extras", EXTRAS)
def test_an_install_line_of_the_documents_works(extras: str, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob(f"*{platform.machine()}.whl")
    names = [name for name in extras.split(",") if name]
    python = clean_environment(tmp_path / "environment", extras_of(wheel, names))
    install(python, f"lightning-safusion[{extras}]" if extras else "lightning-safusion", "--find-links", built)
    package = next((tmp_path / "environment").rglob("lightning_safusion/__init__.py"))
    loaded = (
        "import lightning_safusion as s; from lightning_safusion.kernels import cpu; print(s.__file__, cpu.usable())"
    )
    assert run(python, "-c", loaded, cwd=tmp_path).split() == [str(package), "True"]
    if not names:
        shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path)
        assert "loss 0.0" in run(python, "quickstart.py", cwd=tmp_path)
    command = python.parent / "safusion"
    assert "saf-pooled" in run(command, "systems", cwd=tmp_path)
    if {"plot", "examples"} <= set(names):
        run(command, "demo", "--epochs", "1", "--systems", "ddp,saf-pooled", "--output", "out", cwd=tmp_path)


def test_the_wheel_without_a_library_trains(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*-any.whl")
    python = clean_environment(tmp_path / "environment", extras_of(wheel, []))
    install(python, wheel)
    usable = "from lightning_safusion.kernels import cpu; print(cpu.usable())"
    assert run(python, "-c", usable, cwd=tmp_path).strip() == "False"
    shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path)
    assert "loss 0.0" in run(python, "quickstart.py", cwd=tmp_path)
