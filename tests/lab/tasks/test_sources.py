"""Source text: split by file, the same wherever the files lie, and refused where there is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tasks.sources import Source, source_files, source_roots, split_text


def written(root: Path, names: dict[str, str]) -> Path:
    for name, text in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def contents(sources: list[Source], held_out: bool) -> list[str]:
    return [source.path.read_text() for source in sources if source.held_out is held_out]


def test_files_are_split_by_name_in_one_order_on_every_machine(tmp_path: Path) -> None:
    names = {f"folder{i % 3}/file{i}.{'py' if i % 2 else 'h'}": f"text {i}\n" for i in range(200)}
    first = source_files([written(tmp_path / "one", names)])
    second = source_files([written(tmp_path / "deep" / "two", dict(reversed(names.items())) | {"a.txt": "no source"})])
    for held_out in (False, True):
        assert contents(first, held_out) == contents(second, held_out)
    assert 0 < len(contents(first, True)) < 30
    training, rest = split_text(first, 1500, 60)
    lines = [set(bytes(text.tolist()).decode().splitlines()) for text in (training, rest)]
    assert not lines[0] & {line for line in lines[1] if line in {text.strip() for text in names.values()}}


def test_versions_of_a_header_are_on_one_side_and_copies_come_once(tmp_path: Path) -> None:
    headers = {f"x/include/cuda{i}.h": f"version 1 of {i}\n" for i in range(60)}
    others = {f"y/z/include/cuda{i}.h": f"version 2 of {i}\n" for i in range(30)}
    copies = {f"w/include/cuda{i}.h": f"version 1 of {i}\n" for i in range(30, 60)}
    sources = source_files([written(tmp_path, headers | others | copies)])
    sides = {source.path: source.held_out for source in sources}
    for name in headers:
        assert len({side for path, side in sides.items() if path.name == Path(name).name}) == 1
    training, held_out = (bytes(text.tolist()).decode() for text in split_text(sources, 1800, 150))
    lines = (training + held_out).splitlines()
    assert len(lines) == len(set(lines)) >= 60


def test_little_text_is_refused(tmp_path: Path) -> None:
    sources = source_files([written(tmp_path, {"a.py": "x = 1\n"})])
    with pytest.raises(FileNotFoundError, match=r"bytes of source text to .* in 1 files, at least 500 are needed"):
        split_text(sources, 1000, 1000)


def test_a_machine_with_torch_has_some() -> None:
    assert len(source_files([source_roots()[1] / "include" / "torch"])) > 50
