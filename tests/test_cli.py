"""The command line: help, version, wrong arguments, and a missing extra."""

from __future__ import annotations

import sys

import pytest

from lightning_safusion import cli
from lightning_safusion.__about__ import __version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_help_explains_every_argument_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for argument in ("--density", "--epochs", "--workers", "--seed", "--systems", "--output"):
        assert argument in text
    assert "Share of the gradient elements" in text


@pytest.mark.parametrize("arguments", [[], ["train"], ["demo", "--density", "much"], ["demo", "--colour", "red"]])
def test_what_cannot_be_parsed_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "1.5"], r"density is 1\.5.*\(0, 1\]"),
        (["--density", "0"], r"density is 0\.0.*\(0, 1\]"),
        (["--workers", "1"], "workers is 1.*2 or more"),
        (["--epochs", "0"], "epochs is 0.*1 or more"),
        (["--systems", "ddp,horse"], "horse.*choose from ddp, behind"),
        (["--systems", "ddp,ddp"], "ddp.*once"),
    ],
)
def test_a_useless_value_ends_with_a_message_that_names_it(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cli.main(["demo", *arguments])


def test_without_jsonargparse_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(SystemExit, match=r'pip install "lightning-safusion\[cli\]"'):
        cli.main(["demo"])
