"""Every command in the documents is one that exists, with options that it takes."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

import lab.__main__
import safusion_command
from lab.__main__ import STUDIES
from tests.documents.pages import PAGES, ROOT, commands, name

#: Programs that start others, with their own options before the script.
LAUNCHERS = ("torchrun", "srun", "horovodrun", "mpirun", "sudo", "sbatch")
#: Names of the interpreter; machines with a GPU may have the second alone.
PYTHON = ("python", "python3")
#: Programs of the system and of other projects.
OTHERS = ("export", "mkdir", "curl", "hf", "for", "cd", "tar", "git", "ls")
#: Subcommands of the project's programs, and what runs them.
PROGRAMS = {"safusion_command": (safusion_command.COMMANDS, safusion_command.main), "lab": (STUDIES, lab.__main__.main)}
#: Scripts of the reader.
THEIRS = ("train.py",)


def check(words: Sequence[str]) -> None:
    """Fails if a command could not be run from the root of the repository."""
    words = [word for word in words[: _end(words)] if word != "&&"]
    while re.match(r"\w+=", words[0]):  # of the environment
        words = words[1:]
    program, *args = words
    if program in OTHERS:
        return
    if program in LAUNCHERS:
        started = next(place for place, word in enumerate(args) if _is_start(word))
        check(args[started:] if args[started] != "-m" else ["python", *args[started:]])
    elif program in PYTHON or program.endswith((".py", ".sbatch")):
        _check_python(args if program in PYTHON else words)
    else:
        CHECKS[program.rpartition("/")[2]](words)


def _end(words: Sequence[str]) -> int:
    return next((place for place, word in enumerate(words) if word in (">", "|")), len(words))


def _is_start(word: str) -> bool:
    return word in ("python", "safusion", "-m") or word.endswith((".py", ".sbatch"))


def _check_python(args: Sequence[str]) -> None:
    if args[0] == "-m":
        module, *rest = args[1:]
        if module in ("lab", "safusion_command"):
            _parse(module, rest)
        elif module == "pytest":
            _check_tests([module, *rest])
        else:
            folder = ROOT / module.replace(".", "/")
            assert folder.is_dir() or folder.with_suffix(".py").exists(), f"no module {module}"
    elif args[0] != "-c":
        assert args[0] in THEIRS or (ROOT / args[0]).exists(), f"no script {args[0]}"
    for config in re.findall(r"--config[ =](\S+)", " ".join(args)):
        assert "/" not in config or config.isupper() or "WORKLOAD" in config or (ROOT / config).exists(), config


def _parse(program: str, args: Sequence[str]) -> None:
    table, main = PROGRAMS[program]
    if not args or args[0][0] in "-…":
        return  # the list of subcommands
    assert args[0] in table, f"no subcommand {args[0]}"
    if len(args) == 1 or "--help" in args:
        return  # its name is meant, or it needs nothing
    module, _, name = table[args[0]][0].partition(":")
    called = Mock()
    with pytest.MonkeyPatch.context() as patch:
        function = getattr(importlib.import_module(module), name)
        patch.setattr(f"{module}.{name}", functools.wraps(function)(lambda *_, **__: called()))
        main(list(args))
    called.assert_called_once()


def _check_tests(words: Sequence[str]) -> None:
    for path in (word.partition("::")[0] for word in words if word.startswith("tests/")):
        assert (ROOT / path).exists(), f"no test {path}"


def _check_make(words: Sequence[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in (word for word in words[1:] if re.fullmatch(r"[\w-]+", word)):
        assert target in targets, f"no target {target}"


def _check_pip(words: Sequence[str]) -> None:
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for extras in re.findall(r"(?:^|\s)(?:lightning-safusion|\.)\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= declared, extras


def _check_script(words: Sequence[str]) -> None:
    assert (ROOT / words[0]).stat().st_mode & 0o100, words[0]


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "safusion": lambda words: _parse("safusion_command", words[1:]),
    "pytest": _check_tests,
    "make": _check_make,
    "pip": _check_pip,
    "install_horovod.sh": _check_script,
    "run": _check_script,
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist_and_take_their_options(page: Path) -> None:
    for words in commands(page):
        try:
            check(words)
        except (SystemExit, AssertionError, LookupError, OSError) as error:
            pytest.fail(f"{' '.join(words)}: {error!r}")


def test_there_are_commands() -> None:
    found = {words[0] for page in PAGES for words in commands(page)}
    assert {"safusion", "python", "make", "pip"} <= found


WRONG = ("safusion plan --nodse 2", "safusion plam 2", "python -m lab formats --valeus q4", "make sight", "unknown")


@pytest.mark.parametrize("command", WRONG)
def test_a_command_that_is_wrong_is_found(command: str) -> None:
    with pytest.raises((SystemExit, AssertionError, LookupError)):
        check(command.split())
