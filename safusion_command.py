"""The ``safusion`` command, and how a command with subcommands is made of functions.

It stands beside the package, because to import anything of the package imports torch and Lightning, which takes
seconds: what a subcommand needs is imported when that subcommand is called.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

#: Each subcommand: the function that it calls, as ``MODULE:NAME``, and what it does, in a line.
COMMANDS = {
    "demo": (
        "lightning_safusion.demo.run:run_demo",
        "Trains a small network on real data under several systems and compares them.",
    ),
    "plan": (
        "lightning_safusion.simulate.report:run_plan",
        "Predicts what each system would do on a cluster, and which settings to take.",
    ),
    "bench": (
        "lightning_safusion.bench.run:run_bench",
        "Measures systems side by side in a job of yours and says which to take, or over links of a given rate.",
    ),
    "systems": (
        "lightning_safusion.systems:print_systems",
        "Prints the systems that SAFusionStrategy(system=...) takes.",
    ),
    "trace": (
        "lightning_safusion.profiling.trace:trace",
        "Merges the traces that OverlapProfiler has written on all ranks.",
    ),
    "report": (
        "lightning_safusion.report.page:report",
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
    about = "Sparsification before tensor fusion."
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
            parser = make(prog=program, description=description, version=release)
            subcommands = parser.add_subcommands()
            for name, (_, summary) in commands.items():
                subcommands.add_subcommand(name, make(), help=summary)
            parser.parse_args(list(args))
            return
        module, _, name = commands[args[0]][0].partition(":")
        function = getattr(importlib.import_module(module), name)
        parser = make(prog=f"{program} {args[0]}", description=(function.__doc__ or "").partition("\n\n    Args:")[0])
        parser.add_function_arguments(function, as_group=False, as_positional=True)
        function(**parser.parse_args(spelled(args[1:], function)).as_dict())
    except (ModuleNotFoundError, RuntimeError, ValueError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped")


def spelled(args: Sequence[str], function: Callable[..., Any]) -> list[str]:
    """Arguments as jsonargparse reads them: underscores in options, JSON for several values, a value for each flag.

    Args:
        args: As they were given.
        function: Takes them.
    """
    hints = get_type_hints(function)
    flags = {name for name in signature(function).parameters if hints.get(name) in (bool, bool | None)}
    several = {name for name in hints if str(hints[name]).startswith(("list", "collections.abc.Sequence"))}
    left, result = list(args), []
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            result.append(word)
            continue
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_")
        if not equals and name in flags and (not left or left[0].lower() not in ("true", "false")):
            equals, value = "=", "true"
        if name in several and (equals or left):
            from lightning_safusion.bench.rows import split  # by now the subcommand has imported the package

            text = value if equals else left.pop(0)
            equals, value = "=", text if text.startswith("[") else json.dumps(split(text))
        result.append(f"--{name}{equals}{value}")
    return result


def _parser_class() -> type[ArgumentParser]:
    try:
        from jsonargparse import ArgumentParser
    except ModuleNotFoundError as error:
        message = 'the command line needs jsonargparse: pip install "lightning-safusion[cli]"'
        raise ModuleNotFoundError(message) from error
    return ArgumentParser


if __name__ == "__main__":
    main()
