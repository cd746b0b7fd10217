"""Builds all that a release consists of: the sdist, a wheel with the library for each platform, and one without.

    python scripts/build_wheels.py [--output dist] [--platforms x86_64 aarch64]

The library is plain C that ctypes loads, so that one wheel serves every Python of a platform. A platform other than
that of this machine needs a cross compiler (Debian and Ubuntu: gcc-aarch64-linux-gnu). auditwheel tests that each wheel
runs on the glibc of its tag.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLATFORMS = ("x86_64", "aarch64")
POLICY = "manylinux_2_17_{}"  # glibc 2.17 of 2012, the oldest for aarch64


def compiler(machine: str) -> str:
    """The C compiler for a machine, as it is called.

    Raises:
        SystemExit: If there is none.
    """
    own = ["cc", "gcc"] if machine == platform.machine() else []
    for name in (*own, f"{machine}-linux-gnu-gcc"):
        if shutil.which(name):
            return name
    sys.exit(f"no C compiler for {machine}: install {machine}-linux-gnu-gcc, or leave it out of --platforms")


def build_sdist(output: Path) -> Path:
    """Builds the sdist.

    Args:
        output: Folder for it.
    """
    _python("build", "--sdist", "--outdir", str(output), str(ROOT))
    return max(output.glob("lightning_safusion-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def build_wheel(sdist: Path, output: Path, machine: str | None) -> Path:
    """Builds a wheel from an sdist.

    Args:
        sdist: The sdist.
        output: Folder for the wheel.
        machine: Whose library it holds; ``None`` for a wheel without one.

    Raises:
        subprocess.CalledProcessError: If it cannot be built.
        SystemExit: If there is no compiler, or the wheel needs a later glibc than its tag says.
    """
    environment, options = dict(os.environ), []
    if machine is None:
        environment["SAFUSION_KERNELS"] = "none"
    else:
        environment |= {"CC": compiler(machine), "LDSHARED": f"{compiler(machine)} -shared"}
        options = [f"--config-setting=--build-option=--plat-name={POLICY.format(machine)}"]
    with tempfile.TemporaryDirectory() as work:
        shutil.unpack_archive(sdist, work)  # a tree of its own: objects of another platform must not stay
        (tree,) = Path(work).iterdir()
        _python("build", "--wheel", "--outdir", f"{work}/built", *options, str(tree), environment=environment)
        (built,) = Path(work, "built").glob("*.whl")
        if machine is not None:
            check_policy(built, machine)
        return Path(shutil.copy(built, output))


def check_policy(wheel: Path, machine: str) -> None:
    """Prints what ``auditwheel show`` says of a wheel.

    Args:
        wheel: The wheel.
        machine: Whose library it holds.

    Raises:
        SystemExit: If it has no library, or one that needs a later glibc than its tag says.
    """
    shown = _python("auditwheel", "show", str(wheel), stdout=subprocess.PIPE)
    print(shown, flush=True)
    found = re.search(rf'"manylinux_2_(\d+)_{machine}"', shown)
    if found is None or int(found[1]) > int(POLICY.split("_")[2]):
        sys.exit(f"{wheel.name} is not a wheel for {POLICY.format(machine)}")


def _python(module: str, *arguments: str, environment: dict[str, str] | None = None, stdout: int | None = None) -> str:
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, env=environment, stdout=stdout, text=True, check=True)  # noqa: S603 - our own tools
    return ended.stdout or ""


def main() -> None:
    """Builds them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for what is built (%(default)s)")
    parser.add_argument("--platforms", nargs="*", choices=PLATFORMS, default=PLATFORMS, help="machines with a library")
    args = parser.parse_args()
    for machine in args.platforms:
        compiler(machine)  # before the work begins
    sdist = build_sdist(args.output)
    made = [sdist, *(build_wheel(sdist, args.output, machine) for machine in (*args.platforms, None))]
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
