"""The command line: help, version, and wrong arguments."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from docstring_parser import parse

import safusion_command
from lab.__main__ import STUDIES
from lightning_safusion.__about__ import __version__


def function_of(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        safusion_command.main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", safusion_command.COMMANDS)
def test_help_has_every_option_and_names_types_as_people_do(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        safusion_command.main([command, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    function = function_of(safusion_command.COMMANDS[command][0])
    for param in parse(function.__doc__ or "").params:
        assert " ".join((param.description or "").replace("``", "").split())[:20] in text
    for name, parameter in inspect.signature(function).parameters.items():
        assert (name if parameter.default is parameter.empty else f"--{name.replace('_', '-')}") in text
    assert "<class" not in text
    assert "Sequence[" not in text
    assert "--document" not in text


def test_options_are_there_without_docstrings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = function_of(safusion_command.COMMANDS["plan"][0])
    monkeypatch.setattr(function, "__doc__", None)  # as under python -OO
    with pytest.raises(SystemExit) as ended:
        safusion_command.main(["plan", "--help"])
    assert ended.value.code == 0
    assert "--nodes" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["train"], ["demo", "--density", "much"], ["demo", "--colour", "red"]])
def test_what_cannot_be_parsed_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        safusion_command.main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "1.5"], r"density is 1\.5.*\(0, 1\]"),
        (["--density", "0"], r"density is 0\.0.*\(0, 1\]"),
        (["--workers", "1"], "workers is 1.*2 or more"),
        (["--epochs", "0"], "epochs is 0.*1 or more"),
        (["--systems", "ddp,horse"], "unknown system 'horse'"),
        (["--systems", "ddp,ddp"], "ddp.*once"),
        (["--systems", "ddp,behind[memory=non]"], r"behind\[memory=non\].*non"),
    ],
)
def test_a_useless_value_ends_with_a_message_that_names_it(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        safusion_command.main(["demo", *arguments])


@pytest.mark.parametrize(
    ("argument", "code", "shown"),
    [
        ("systems", 0, "saf-pooled"),
        ("--version", 0, __version__),
        ("--help", 0, "plan"),
        ("pln", 2, "mean 'plan'?"),
        ("demo", 1, 'demo needs matplotlib and sklearn: pip install "lightning-safusion[examples,plot]"\n'),
    ],
)
def test_what_trains_nothing_waits_for_nothing_and_needs_no_extra(argument: str, code: int, shown: str) -> None:
    script = f"""
import importlib.util
import sys

GONE, find_spec = ("torch", "lightning", "matplotlib", "sklearn"), importlib.util.find_spec
sys.modules |= dict.fromkeys(GONE)  # these cannot be imported
importlib.util.find_spec = lambda name: None if name in GONE else find_spec(name)
sys.argv[1:] = [{argument!r}]
import safusion_command
safusion_command.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert shown in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--gpu-per-node", "3"], "unknown option '--gpu-per-node'. Did you mean '--gpus-per-node'?"),
        (["plan", "--bandwith=1gbit"], "unknown option '--bandwith'. Did you mean '--bandwidth'?"),
        (["plan", "--node", "3"], "unknown option '--node'. Did you mean '--nodes'?"),  # no abbreviation
        (["plan", "--gpus", "3"], "unknown option '--gpus'. Did you mean '--gpus-per-node'?"),
        (["plan", "--model", "bert-large"], "unknown option '--model'.\n"),
        (["bench", "--zzz"], "unknown option '--zzz'.\n"),
        (["bench", "--", "--zzz"], "unknown option '--'.\n"),
        (["bench", "config.yaml"], "'config.yaml' has no option before it. Did you mean --config config.yaml?"),
        (["plan", "bert-large"], "'bert-large' has no option before it. Did you mean --trace bert-large?"),
        (["plan", "--nodes", "2", "3"], "'3' has no option before it. Did you mean --trace 3?"),
        (["plan", "job.yaml"], "If it describes a job: safusion bench --config job.yaml"),
        (["timeline", "run", "page.html"], "'page.html' has no option before it. Did you mean --output page.html?"),
        (["pln"], "unknown subcommand 'pln'. Did you mean 'plan'? Choose one of 'demo', 'plan', 'bench',"),
        (["--completion", "fish"], "--completion takes bash, zsh, tcsh"),
        (["plan", "--nodes", "two"], "--nodes is a whole number, got 'two'"),
        (["plan", "--jitter=wide"], "--jitter is a number, got 'wide'"),
        (["bench", "--density", "0.1,few"], "--density is a number, got 'few'"),
        (["bench", "--calibrate=maybe"], "--calibrate is true or false, got 'maybe'"),
    ],
)
def test_what_was_probably_meant_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        safusion_command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["safusion", "pl"], ["plan"]),
        (["safusion", "plan", "--gpus"], ["--gpus-per-node"]),
        (["safusion", "bench", "--m"], ["--minutes", "--model"]),
    ],
)
def test_bash_completes_commands_and_options(
    words: list[str], offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    safusion_command.main(["--completion", "bash"])
    asked = " ".join(words)
    script = f"""
{capsys.readouterr().out}
COMP_WORDS=({asked}) COMP_CWORD={len(words) - 1}
$(complete -p safusion | sed 's/.*-F \\([^ ]*\\).*/\\1/') safusion {words[-1]} {words[-2]}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)  # noqa: S607
    assert sorted(done.stdout.split()) == offered


@pytest.mark.parametrize("commands", [safusion_command.COMMANDS, STUDIES])
def test_every_subcommand_is_a_documented_function(commands: Mapping[str, tuple[str, str]]) -> None:
    for path, summary in commands.values():
        function = function_of(path)
        described = (function.__doc__ or "").partition("Args:")[2]
        assert all(f"{option}: " in described for option in inspect.signature(function).parameters), path
        assert summary.endswith("."), path


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--gpus_per_node", "4"], ["--gpus-per-node=4"]),
        (["--gpus-per-node=4"], ["--gpus-per-node=4"]),
        (["--names", "a,b[c=1,d=2]"], ['--names=["a", "b[c=1,d=2]"]']),
        (["--names", "a", "--names=b,c"], ['--names=["a", "b", "c"]']),
        (["--names", "[a]"], ["--names=[a]"]),
        (["--some_flag"], ["--some-flag=true"]),
        (["--some-flag", "false"], ["--some-flag=false"]),
        (["--perhaps"], ["--perhaps=true"]),
        (["--some-flag", "--names", "a-b"], ["--some-flag=true", '--names=["a-b"]']),
        (["4", "--text", "a,b"], ["4", "--text=a,b"]),
        (["--text", "--some-flag"], ["--text", "--some-flag=true"]),
    ],
)
def test_dashes_flags_and_several_values_are_understood(given: list[str], read: list[str]) -> None:
    def function(
        gpus_per_node: int, names: Sequence[str], some_flag: bool, text: str, perhaps: bool | None
    ) -> None: ...

    assert safusion_command.spelled(given, function) == read
