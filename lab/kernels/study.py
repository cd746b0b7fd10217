"""What GPU compilers make of the Triton kernels, by version of Triton; no device is needed.

    $ python -m lab kernels
    $ python -m lab kernels --tritons 3.6.0 --targets 90 --json kernels.json

Each version is installed by pip into a folder of its own, which is gone afterwards, and takes the place of the one of
this environment. Of every kernel the variant with most instructions is shown: instructions of the binary / registers of
a thread / programs that a multiprocessor has room for. Below that is what no variant may have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from json import dumps, loads
from pathlib import Path
from typing import Any

from lab.kernels.described import TOOLS
from lab.markdown import markdown

#: The versions that CUDA builds of torch pin, from 2.6 on, and newer ones.
TRITONS = ("3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
#: Compute capabilities times ten, and chips of AMD.
TARGETS = ("80", "90", "100", "gfx942")
#: Combinations that have no compiler: that of Triton 3.2 does not know devices of compute capability 10.
UNKNOWN = frozenset({("3.2.0", "100")})
#: Kernels of a buffer.
OF_BUFFERS = (
    "compensate", "share", "collect", "narrow", "count_chunks", "write", "pack", "decode", "reduce", "commit", "place",
    "count_above", "add_up",
)  # fmt: skip

#: By version, target and variant of a kernel: what :func:`lab.kernels.described.described` finds.
Found = dict[str, dict[str, dict[str, dict[str, Any]]]]
ROOT = Path(__file__).parents[2]


def install(package: str, version: str, folder: Path) -> None:
    """Installs a package into a folder, alone.

    Raises:
        ConnectionError: If pip has failed, as it does without a network.
    """
    options = ("--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check", "--target", str(folder))
    command = [sys.executable, "-m", "pip", "install", *options, f"{package}=={version}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise ConnectionError(f"pip could not install {package} {version}: {ended.stderr.strip()[-500:]}")


def compiled(targets: Sequence[str], triton: Path | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """What a Triton makes of all kernels, by target and variant.

    Args:
        targets: All NVIDIA's or all AMD's.
        triton: The folder where it is installed; that of this environment by default.

    Raises:
        RuntimeError: If the process that compiles has failed.
    """
    own = find_spec("triton")
    if own is None or own.origin is None:
        raise RuntimeError("this environment has no Triton, whose tools read what is compiled")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, ["" if triton is None else str(triton), *paths])),
            TOOLS: str(Path(own.origin).parent / "backends" / "nvidia" / "bin"),
            "TRITON_CACHE_DIR": cache,
            "TRITON_INTERPRET": "0",
        }
        command = [sys.executable, "-m", "lab.kernels.compiling", ",".join(targets)]
        ended = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"nothing was compiled: {ended.stderr.strip()[-2000:]}")
    found: dict[str, dict[str, dict[str, Any]]] = loads(ended.stdout)["targets"]
    return found


def compiled_by(version: str, targets: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """What a version makes of all kernels; it is installed for that, and removed."""
    makers = [[t for t in targets if t.isdigit()], [t for t in targets if not t.isdigit()]]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        install("triton", version, Path(folder))
        for own in makers:
            known = [target for target in own if (version, target) not in UNKNOWN]
            if known:
                found |= compiled(known, Path(folder))
    return found


def largest(variants: Mapping[str, dict[str, Any]], kernel: str) -> dict[str, Any] | None:
    """Of a kernel's variants the one with most instructions; None if one of them is not compiled."""
    own = [code for label, code in variants.items() if label.partition("[")[0] == kernel]
    if not own or any("error" in code for code in own):
        return None
    return max(own, key=lambda code: code["instructions"])


def ratios(found: Found, target: str) -> dict[str, float]:
    """By variant: most instructions that a version needs over the fewest."""
    counts: dict[str, list[int]] = {}
    for targets in found.values():
        for label, code in targets.get(target, {}).items():
            if "error" not in code:
                counts.setdefault(label, []).append(code["instructions"])
    return {label: max(several) / min(several) for label, several in counts.items()}


def table_of(found: Found, target: str) -> str:
    """Instructions, registers and programs on a multiprocessor, by kernel and version."""
    names = {label.partition("[")[0]: None for targets in found.values() for label in targets.get(target, {})}
    worst, rows = ratios(found, target), []
    for kernel in names:
        cells = []
        for targets in found.values():
            code = largest(targets.get(target, {}), kernel)
            figures = () if code is None else (code["instructions"], code["registers"], code.get("blocks"))
            cells.append(" / ".join(str(figure) for figure in figures if figure is not None) or "–")
        ratio = max((each for label, each in worst.items() if label.partition("[")[0] == kernel), default=0.0)
        rows.append((f"`{kernel}`", *cells, f"{ratio:.2f}"))
    return markdown(("kernel", *found, "most over least"), rows)


def faults(found: Found) -> list[str]:
    """What no variant may have, of all that were compiled."""
    return [
        f"{label} for {target} with Triton {version}: {fault}"
        for version, targets in found.items()
        for target, variants in targets.items()
        for label, code in variants.items()
        for fault in _faults_of(label, code, target.isdigit())
    ]


def _faults_of(label: str, code: Mapping[str, Any], nvidia: bool) -> list[str]:
    """Of one variant: errors, spills, other roundings, room for one program only, a second compilation."""
    if "error" in code:
        return [code["error"]]
    name = label.partition("[")[0]
    weighed = name in ("compensate", "reduce") and "MOMENT=-1" not in label
    wanted = {
        "barriers": name in ("decode", "reduce", "commit"),
        "divisions": nvidia and (weighed or name == "decode"),
        "roots": nvidia and weighed,
    }
    unwanted = "spills", "fused", "flushed", "float atomics", "subtracted from 0"
    wrong = [f"{code[what]} {what}" for what in unwanted if code[what]]
    wrong += [f"no {what}" for what, asked in wanted.items() if asked and not code[what]]
    if code.get("blocks", 2) < 2:
        wrong.append("room for one program")
    if code["compilations"] > 1:
        wrong.append("compiled again for other places")
    return wrong


def kernels(
    tritons: Sequence[str] = TRITONS, targets: Sequence[str] = TARGETS, processes: int = 2, json: Path | None = None
) -> None:
    """What GPU compilers make of the Triton kernels, by version of Triton; installs each with pip.

    Args:
        tritons: Versions.
        targets: Compute capabilities times ten, and names of AMD's chips.
        processes: Versions that compile at once.
        json: File for all figures.
    """
    with ThreadPoolExecutor(processes) as pool:
        found: Found = dict(zip(tritons, pool.map(lambda version: compiled_by(version, targets), tritons), strict=True))
    for target in targets:
        print(f"\n{'sm_' if target.isdigit() else ''}{target}\n\n{table_of(found, target)}")
    wrong = faults(found)
    print("\n" + ("\n".join(wrong) if wrong else "no faults"))
    if json is not None:
        json.write_text(dumps(found, indent=1))
