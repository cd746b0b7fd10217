"""One file with all that a run has written, small enough to be sent anywhere."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

#: Most bytes of an archive.
LIMIT = 8 << 20
#: Folder of compiled kernels, in that of the figures; no part of the archive.
CACHE = "triton-cache"
# In this order; then all others, small ones first.
_FIRST = ("gpu.md", "gpu.json", "device-costs.json")
# Bytes of the names, sizes and padding of a file, and of the end of an archive.
_HEADER, _END = 1536, 20 << 10


def path_of(folder: Path) -> Path:
    """Where the archive of a folder is: beside it."""
    return folder.with_name(f"{folder.name}.tgz")


def archive(folder: Path, limit: int = LIMIT) -> Path:
    """Packs a folder into one file beside it; what it held before is replaced at once.

    Args:
        folder: Its files, and those of its folders but for compiled kernels.
        limit: Most bytes of the archive. What has no room is named in its file ``left-out.txt``.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and CACHE not in path.relative_to(folder).parts]
    packed, left = _fitting(folder, files, limit)
    target = path_of(folder)
    part = target.with_suffix(".part")
    with tarfile.open(part, "w:gz") as tar:
        for path in packed:
            tar.add(path, f"{folder.name}/{path.relative_to(folder)}")
        if left:
            _add_text(tar, f"{folder.name}/left-out.txt", "".join(f"{path.relative_to(folder)}\n" for path in left))
    part.replace(target)
    return target


def _fitting(folder: Path, files: Sequence[Path], limit: int) -> tuple[list[Path], list[Path]]:
    """Files that fit, by their compressed sizes, and those that do not."""
    sizes = {path: len(zlib.compress(path.read_bytes())) + _HEADER for path in files}
    room, packed, left = limit - _END, list[Path](), list[Path]()
    ranks = {folder / name: rank for rank, name in enumerate(_FIRST)}
    for path in sorted(files, key=lambda path: (ranks.get(path, len(ranks)), sizes[path], path)):
        fits = sizes[path] <= room
        (packed if fits else left).append(path)
        room -= sizes[path] if fits else 0
    return packed, left


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
