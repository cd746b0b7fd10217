"""The ``safusion`` command, and how a command with subcommands is made of functions.

It stands beside the package, because to import anything of the package imports torch and Lightning, which takes
seconds: options are read from the sources, and a subcommand is imported when its options are good.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import sys
from argparse import SUPPRESS, Action
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

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
        "lightning_safusion.tools.listing:print_systems",
        "Prints the systems that SAFusionStrategy(system=...) takes.",
    ),
    "timeline": (
        "lightning_safusion.profiling.timeline_file:timeline",
        "Merges the timelines that OverlapProfiler has written on all ranks.",
    ),
    "report": (
        "lightning_safusion.tools.report.page:report",
        "Makes a web page of what the callbacks of a run have measured.",
    ),
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Arguments after the program's name; those of the process by default.

    Raises:
        SystemExit: With 1 and a message if the command failed, with 2 if the arguments are wrong.
    """
    about = "Find out whether compressed gradients help your training, and watch them."
    run("safusion", about, COMMANDS, sys.argv[1:] if args is None else args, version("lightning-safusion"))


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
        make = _parser_class()
        if not args or args[0] not in commands:
            _about(make(prog=program, description=description, version=release), commands, args, make)
            return
        path = commands[args[0]][0]
        described = describe(path)
        parser = make(prog=f"{program} {args[0]}", allow_abbrev=False)
        add_arguments(parser, described)
        try:
            given = spelled(args[1:], described)
        except (LookupError, ValueError) as error:
            parser.error(str(error.args[0]))
        values = parser.parse_args(given).as_dict()
        module, _, name = path.partition(":")
        getattr(importlib.import_module(module), name)(**values)
    except (ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped")


def _about(
    parser: ArgumentParser,
    commands: Mapping[str, tuple[str, str]],
    args: Sequence[str],
    make: Callable[..., ArgumentParser],
) -> None:
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
        try:
            _lookup("check_name")("subcommand", args[0], commands)
        except ValueError as error:
            parser.error(str(error))
    subcommands = parser.add_subcommands()
    for name, (_, summary) in commands.items():
        subcommands.add_subcommand(name, make(), help=summary)
    parser.parse_args(list(args))


def completion(program: str, commands: Mapping[str, tuple[str, str]], shell: str) -> str:
    """A script with which a shell completes subcommands, options and files.

    Args:
        program: As it is called.
        commands: As in :data:`COMMANDS`.
        shell: ``"bash"``, ``"zsh"`` or ``"tcsh"``.

    Raises:
        ModuleNotFoundError: If shtab is missing; names the extra that brings it.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('completion needs shtab: pip install "lightning-safusion[cli]"') from error
    parser = PlainParser(prog=program)
    subcommands = parser.add_subparsers()
    for name, (path, summary) in commands.items():
        subcommand = subcommands.add_parser(name, help=summary)
        described = describe(path)
        hints = get_type_hints(described)
        for parameter in signature(described).parameters.values():
            required = parameter.default is parameter.empty
            option = parameter.name if required else f"--{parameter.name.replace('_', '-')}"
            action = subcommand.add_argument(option)
            if "Path" in str(hints[parameter.name]):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab is told
    return str(shtab.complete(parser, shell))


def add_arguments(parser: ArgumentParser, function: Callable[..., Any]) -> None:
    """Gives a parser the description and the arguments of a function, with their types, defaults and texts."""
    from docstring_parser import parse  # jsonargparse[signatures] brings it

    documented = parse(function.__doc__ or "")
    about_all = "\n\n".join(filter(None, (documented.short_description, documented.long_description)))
    parser.description = about_all.replace("``", "")
    texts = {each.arg_name: " ".join((each.description or "").replace("``", "").split()) for each in documented.params}
    hints = get_type_hints(function)
    for name, parameter in signature(function).parameters.items():
        about: dict[str, Any] = {"type": hints[name], "help": texts[name]}
        if parameter.default is parameter.empty:
            parser.add_argument(name, **about)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", default=parameter.default, **about)


def describe(path: str) -> Callable[..., Any]:
    """The function behind a subcommand, without its body: arguments and docstring, read from the source.

    Defaults may name constants of the module, fields of its classes, and keys of its dictionaries.

    Args:
        path: ``MODULE:NAME``.

    Raises:
        ModuleNotFoundError: If there is no such package.
    """
    module, _, name = path.partition(":")
    nodes = ast.parse(_source(module).read_text("utf-8")).body
    (function,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
    function.body, function.returns = function.body[:1], None  # the docstring
    known: dict[str, Any] = {"Path": Path, "Sequence": Sequence, "os": os} | dict(_constants(nodes))
    source = f"from __future__ import annotations\n{ast.unparse(function)}"
    exec(source, known)  # noqa: S102 - a part of our own package
    described: Callable[..., Any] = known[name]
    return described


def _source(module: str) -> Path:
    """The file of a module, whose package is not imported."""
    top, *rest = module.split(".")
    found = importlib.util.find_spec(top)  # of a package above all others: it is not imported
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {top}")
    return Path(found.submodule_search_locations[0], *rest).with_suffix(".py")


def _lookup(name: str) -> Callable[..., Any]:
    """A function of the package's ``lookup``, which needs nothing else of the package."""
    function: Callable[..., Any] = runpy.run_path(str(_source("lightning_safusion.lookup")))[name]
    return function


def _constants(nodes: Iterable[ast.stmt]) -> Iterable[tuple[str, Any]]:
    """What a module or a class binds to literals, by name; of dictionaries their keys."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, SimpleNamespace(**dict(_constants(node.body)))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = node.value
            if isinstance(value, ast.Dict):
                value = ast.List([key for key in value.keys if key is not None])
            if isinstance(target, ast.Name):
                with contextlib.suppress(ValueError):
                    yield target.id, ast.literal_eval(value)


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
    hints = get_type_hints(function)
    parameters = signature(function).parameters
    known = [*parameters, "help"]
    flags = {name for name in known if hints.get(name) in (bool, bool | None)}
    several = {name for name in hints if str(hints[name]).startswith(("list", "collections.abc.Sequence"))}
    places = sum(each.default is each.empty for each in parameters.values())
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
            raise LookupError(f"unknown option {option!r}.{_lookup('suggestion')(option, options)}")
        if not equals and name in flags and (not left or left[0].lower() not in ("true", "false")):
            equals, value = "=", "true"
        if name in several and (equals or left):
            from lightning_safusion.notation import split  # the subcommand imports the package next

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
    for word in words:
        option, equals, value = word.partition("=")
        hint = hints.get(option.lstrip("-").replace("-", "_"))
        kinds = set(get_args(hint) or (hint,))
        if not equals or not kinds & {bool, float, int} or (type(None) in kinds and value == "null"):
            continue
        several = value.startswith("[")
        for text in value.strip("[]").split(",") if several else [value]:
            _lookup("read_value")(option, text.strip(' "'), hint)


def _alone(word: str, parameters: Mapping[str, Parameter]) -> str:
    """What is wrong with a value that has no option before it."""
    options = [name for name, each in parameters.items() if each.default is not each.empty]
    if word.endswith((".yaml", ".yml")):
        if "config" not in options:
            return f"{word!r} has no option before it. If it describes a job: safusion bench --config {word}"
        options = ["config"]
    meant = f" Did you mean --{options[0].replace('_', '-')} {word}?" if options else ""
    return f"{word!r} has no option before it.{meant}"


def _parser_class() -> Callable[..., ArgumentParser]:
    try:
        from jsonargparse import ArgumentParser, DefaultHelpFormatter
    except ModuleNotFoundError as error:
        message = 'the command line needs jsonargparse: pip install "lightning-safusion[cli]"'
        raise ModuleNotFoundError(message) from error

    class Help(DefaultHelpFormatter):
        """Types as people name them."""

        def _get_type_str(self, action: Action) -> str | None:
            text: str | None = super()._get_type_str(action)
            return text and text.replace("<class 'Path'>", "Path").replace("Sequence[", "list[")

    return partial(ArgumentParser, formatter_class=Help)


if __name__ == "__main__":
    main()
