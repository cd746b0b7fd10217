"""Compiles the kernels for the CPU, where there is a compiler, and tells an index page where the repository is;
everything else is in pyproject.toml.

``SAFUSION_KERNELS=none`` leaves the kernels out; ``scripts/build_wheels.py`` builds all wheels of a release.
``SAFUSION_URL=https://github.com/OWNER/NAME`` makes the README's links to files lead there: an index page has no files.
Without it the README is taken as it is.
"""

import os
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
HEADER = ROOT / "lightning_safusion" / "kernels" / "cpu" / "kernels.h"
VERSION = re.findall(r"#define VERSION (\d+)", HEADER.read_text())[0]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAPERS = {
    "Paper: SAFusion": "https://doi.org/10.1145/3731545.3731581",
    "Paper: ADTopk": "https://doi.org/10.1145/3625549.3658678",
}


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


def described(home: str) -> dict[str, object]:
    """The README and the links of an index page.

    Args:
        home: Address of the repository; empty where it has none.
    """
    about: dict[str, object] = {"long_description_content_type": "text/markdown"}
    if not home:
        return about | {"long_description": README, "project_urls": PAPERS}
    release = re.findall(r'__version__ = "(.*)"', (ROOT / "lightning_safusion" / "__about__.py").read_text())[0]
    files, home = f"v{release}", home.rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        target = link[1]
        if re.match(r"\w+:", target):
            return link[0]
        shown = "raw" if target.endswith((".png", ".svg")) else "blob"
        return f"]({home}/{shown}/{files}/{'README.md' * target.startswith('#')}{target})"

    urls = {
        "Source": home,
        "Documentation": f"{home}/blob/{files}/README.md#documents",
        "Changelog": f"{home}/blob/{files}/CHANGELOG.md",
    }
    return about | {"long_description": re.sub(r"\]\((\S+?)\)", absolute, README), "project_urls": urls | PAPERS}


# Without Python's headers, so that a compiler is all it takes. Without one, or with one that does not know GCC's
# vectors, the package is installed without the kernels (optional).
kernels = Extension(
    "lightning_safusion.kernels.cpu.libkernels",
    [
        f"lightning_safusion/kernels/cpu/{name}.c"
        for name in ("candidates", "checksum", "eliasfano", "eliasfano_read", "elements", "messages", "shards")
    ],
    depends=[f"lightning_safusion/kernels/cpu/{name}.h" for name in ("eliasfano", "kernels", "messages")],
    extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"],
    optional=True,
)

setup(
    ext_modules=[] if os.environ.get("SAFUSION_KERNELS") == "none" else [kernels],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    **described(os.environ.get("SAFUSION_URL", "")),
)
