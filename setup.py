"""Compiles the kernels for the CPU, where there is a compiler; everything else is in pyproject.toml.

``SAFUSION_KERNELS=none`` leaves them out; ``scripts/build_wheels.py`` builds all wheels of a release.
"""

import os
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HEADER = Path(__file__).parent / "lightning_safusion" / "kernels" / "cpu" / "kernels.h"
VERSION = re.findall(r"#define VERSION (\d+)", HEADER.read_text())[0]


class BuildLibrary(build_ext):
    """Builds a plain library: it is loaded with ctypes, and nobody who walks through the modules shall import it."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so.{VERSION}"


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of a platform; for every platform if no library was built."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        built = list(Path(self.bdist_dir).rglob(f"libkernels.so.{VERSION}"))
        return "py3", "none", platform if built else "any"


# Without Python's headers, so that a compiler is all it takes. Without one, or with one that does not know GCC's
# vectors, the package is installed without the kernels (optional).
kernels = Extension(
    "lightning_safusion.kernels.cpu.libkernels",
    [f"lightning_safusion/kernels/cpu/{name}.c" for name in ("candidates", "eliasfano", "elements", "messages")],
    depends=[f"lightning_safusion/kernels/cpu/{name}.h" for name in ("kernels", "messages")],
    extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"],
    optional=True,
)

setup(
    ext_modules=[] if os.environ.get("SAFUSION_KERNELS") == "none" else [kernels],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
