"""The ``safusion`` command, and how a command with subcommands is made of functions.

It stands beside the package, which imports torch and Lightning to register its strategies. That takes seconds, so it
waits until a subcommand is named that needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from argparse import SUPPRESS, Action
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

import shtab
from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter

_PACKAGE = "lightning_safusion"
_SHELLS = ("bash", "zsh", "tcsh")

#: Each subcommand: the function that it calls, as ``MODULE:NAME``, and what it does, in a line.
COMMANDS = {
    "demo": (
        "lightning_safusion.tools.demo.run:run_demo",
        "Trains a small network on real data under several systems and compares them.",
    ),
    "plan": (
        "lightning_safusion.tools.plan.report:run_plan",
        "Predicts what each system would do on a cluster, and which settings to take.",
    ),
    "bench": (
        "lightning_safusion.tools.bench.run:run_bench",
        "Measures systems side by side in a job of yours, and says which to take.",
    ),
    "systems": (
        "lightning_safusion.tools.tables:print_systems",
        "Prints the systems that SAFusionStrategy(system=...) takes.",
    ),
    "timeline": (
        "lightning_safusion.profiling.timeline_file:timeline",
        "Merges the timelines that OverlapProfiler has written on all ranks.",
    ),
    "report": (
        "lightning_safusion.tools.report.command:report",
        "Makes a web page of a run, or of several side by side.",
    ),
}
#: What subcommands need besides the dependencies of the package.
_NEEDS = {"demo": ("matplotlib", "sklearn"), "bench": ("matplotlib",), "report": ("jinja2", "matplotlib")}
#: Of these functions, those that need neither torch nor Lightning.
_WITHOUT_TORCH = ("lightning_safusion.tools.tables:print_systems",)


class _Help(DefaultHelpFormatter):
    """Types as people name them."""

    def _get_type_str(self, action: Action) -> str | None:
        text: str | None = super()._get_type_str(action)
        return text and text.replace("<class 'Path'>", "Path").replace("Sequence[", "list[")


_Parser: Callable[..., ArgumentParser] = partial(ArgumentParser, formatter_class=_Help)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Arguments after the program's name; those of the process by default.

    Raises:
        SystemExit: With 1 and a message if the command failed, with 2 if the arguments are wrong.
    """
    about = "Find out whether compressed gradients help your training, and watch them."
    if args is None:  # nobody else imports the package in this process
        _hold_back()
    from lightning_safusion.__about__ import __version__

    run("safusion", about, COMMANDS, sys.argv[1:] if args is None else args, __version__)


def run(
    program: str,
    description: str,
    commands: Mapping[str, tuple[str, str]],
    args: Sequence[str],
    release: str | None = None,
) -> None:
    """Runs the subcommand that the arguments name.

    Args:
        program: As it is called.
        description: What it is for.
        commands: As in :data:`COMMANDS`.
        args: Subcommand and options. An option may have dashes for underscores; several values stand between commas.
        release: For ``--version``.

    Raises:
        SystemExit: With 1 and a message if the command failed, with 2 if the arguments are wrong.
    """
    try:
        if not args or args[0] not in commands:
            _about(_Parser(prog=program, description=description, version=release), commands, args)
            return
        if commands is COMMANDS and not {"-h", "--help"} & set(args):
            from lightning_safusion.lookup import need

            need(*_NEEDS.get(args[0], ()), what=args[0])
        function = _function(commands[args[0]][0])
        parser = _Parser(prog=f"{program} {args[0]}", allow_abbrev=False)
        add_arguments(parser, function)
        try:
            given = spelled(args[1:], function)
        except (LookupError, ValueError) as error:
            parser.error(str(error.args[0]))
        function(**parser.parse_args(given).as_dict())
    except (ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped")


def _hold_back() -> None:
    """Lets modules of the package be imported that need neither torch nor Lightning, before the package itself is."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and _PACKAGE not in sys.modules:
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)


def _function(path: str) -> Callable[..., None]:
    """The function behind a subcommand, ``MODULE:NAME``."""
    package = sys.modules.get(_PACKAGE)
    if package is not None and not hasattr(package, "__all__") and path not in _WITHOUT_TORCH:
        importlib.reload(package)  # it was held back: now it is executed
    module, _, name = path.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    return function


def _about(parser: ArgumentParser, commands: Mapping[str, tuple[str, str]], args: Sequence[str]) -> None:
    """Answers arguments that begin with no subcommand: help, version, completion, or an error."""
    about = "Print what completes the command in a shell, and exit."
    installed = " " not in parser.prog  # shells complete commands, not what `python -m` runs
    if installed:
        parser.add_argument("--completion", choices=_SHELLS, default=SUPPRESS, help=about)
    if installed and args and args[0].partition("=")[0] == "--completion":
        shell = args[0].partition("=")[2] or "".join(args[1:2])
        if shell not in _SHELLS:
            parser.error(f"--completion takes {', '.join(_SHELLS)}")
        print(completion(parser.prog, commands, shell))
        return
    if args and not args[0].startswith("-"):
        from lightning_safusion.lookup import check_name

        try:
            check_name("subcommand", args[0], commands)
        except ValueError as error:
            parser.error(str(error))
    subcommands = parser.add_subcommands()
    for name, (_, summary) in commands.items():
        subcommands.add_subcommand(name, _Parser(), help=summary)
    parser.parse_args(list(args))


def completion(program: str, commands: Mapping[str, tuple[str, str]], shell: str) -> str:
    """A script with which a shell completes subcommands, options and files.

    Args:
        program: As it is called.
        commands: As in :data:`COMMANDS`.
        shell: ``"bash"``, ``"zsh"`` or ``"tcsh"``.
    """
    parser = PlainParser(prog=program)
    subcommands = parser.add_subparsers()
    for name, (path, summary) in commands.items():
        subcommand = subcommands.add_parser(name, help=summary)
        function = _function(path)
        hints = get_type_hints(function)
        for parameter in signature(function).parameters.values():
            required = parameter.default is parameter.empty
            option = parameter.name if required else f"--{parameter.name.replace('_', '-')}"
            action = subcommand.add_argument(option)
            if required and "Sequence" in str(hints[parameter.name]):
                action.nargs = "+"
            if "Path" in str(hints[parameter.name]):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab is told
    return str(shtab.complete(parser, shell))


def add_arguments(parser: ArgumentParser, function: Callable[..., Any]) -> None:
    """Gives a parser the description and the arguments of a function, with their types, defaults and texts."""
    documented = parse(function.__doc__ or "")
    about_all = "\n\n".join(filter(None, (documented.short_description, documented.long_description)))
    parser.description = about_all.replace("``", "")
    texts = {each.arg_name: " ".join((each.description or "").replace("``", "").split()) for each in documented.params}
    hints = get_type_hints(function)
    for name, parameter in signature(function).parameters.items():
        about: dict[str, Any] = {"type": hints[name], "help": texts.get(name)}  # None under python -OO
        if parameter.default is parameter.empty:
            if str(hints[name]).startswith("collections.abc.Sequence"):
                about |= {"type": get_args(hints[name])[0], "nargs": "+"}
            parser.add_argument(name, **about)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", default=parameter.default, **about)


def spelled(args: Sequence[str], function: Callable[..., Any]) -> list[str]:
    """Arguments as jsonargparse reads them: dashes in options, JSON for several values (of an option that was given
    several times, all), a value for each flag.

    Args:
        args: As they were given.
        function: Takes them.

    Raises:
        LookupError: If there is no such option, or a value has none before it; suggests what was meant.
        ValueError: If a number or a flag has another value.
    """
    from lightning_safusion.lookup import suggestion
    from lightning_safusion.notation import split

    hints = get_type_hints(function)
    parameters = signature(function).parameters
    known = [*parameters, "help"]
    flags = {name for name in known if hints.get(name) in (bool, bool | None)}
    several = {name for name in hints if str(hints[name]).startswith(("list", "collections.abc.Sequence"))}
    required = {name for name, each in parameters.items() if each.default is each.empty}
    places = float("inf") if several & required else len(required)
    left, result = list(args), []
    lists: dict[str, tuple[int, list[str]]] = {}  # place in the result, values
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            places -= not word.startswith("-")
            if places < 0:
                raise LookupError(_alone(word, parameters))
            result.append(word)
            continue
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_")
        if name not in known:
            options = [f"--{each.replace('_', '-')}" for each in known]
            raise LookupError(f"unknown option {option!r}.{suggestion(option, options)}")
        if not equals and name in flags and (not left or left[0].lower() not in ("true", "false")):
            equals, value = "=", "true"
        if name in several and (equals or left):
            text = value if equals else left.pop(0)
            if not text.startswith("["):
                place, values = lists.setdefault(name, (len(result), []))
                values.extend(split(text))
                result[place:] = [f"--{name.replace('_', '-')}={json.dumps(values)}", *result[place + 1 :]]
                continue
            equals, value = "=", text
        if not equals and name in parameters and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        result.append(f"--{name.replace('_', '-')}{equals}{value}")
    _check_values(result, hints)
    return result


def _check_values(words: Iterable[str], hints: Mapping[str, Any]) -> None:
    """Raises :class:`ValueError` if the value of an option is not a number, or not true or false, as its type says."""
    from lightning_safusion.lookup import read_value

    for word in words:
        option, equals, value = word.partition("=")
        hint = hints.get(option.lstrip("-").replace("-", "_"))
        kinds = set(get_args(hint) or (hint,))
        if not equals or not kinds & {bool, float, int} or (type(None) in kinds and value == "null"):
            continue
        several = value.startswith("[")
        for text in value.strip("[]").split(",") if several else [value]:
            read_value(option, text.strip(' "'), hint)


def _alone(word: str, parameters: Mapping[str, Parameter]) -> str:
    """What is wrong with a value that has no option before it."""
    options = [name for name, each in parameters.items() if each.default is not each.empty]
    if word.endswith((".yaml", ".yml")):
        if "config" not in options:
            return f"{word!r} has no option before it. If it describes a job: safusion bench --config {word}"
        options = ["config"]
    meant = f" Did you mean --{options[0].replace('_', '-')} {word}?" if options else ""
    return f"{word!r} has no option before it.{meant}"


if __name__ == "__main__":
    main()
