"""The ``safusion`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_safusion.__about__ import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Arguments after the program's name; those of the process by default.

    Raises:
        SystemExit: With 1 and a message if the command failed, with 2 if the arguments are wrong.
    """
    try:
        parser, commands = build_parser()
        config = parser.parse_args(args)
        commands[config.subcommand](**config[config.subcommand].as_dict())
    except (ModuleNotFoundError, RuntimeError, ValueError) as error:
        sys.exit(f"safusion: {error}")
    except KeyboardInterrupt:
        sys.exit("safusion: stopped")


def build_parser() -> tuple[ArgumentParser, dict[str, Callable[..., Any]]]:
    """Makes the parser, and the function behind each of its subcommands.

    Raises:
        ModuleNotFoundError: If jsonargparse is missing; names the extra that brings it.
    """
    try:
        from jsonargparse import ArgumentParser
    except ModuleNotFoundError as error:
        message = 'the command line needs jsonargparse: pip install "lightning-safusion[cli]"'
        raise ModuleNotFoundError(message) from error
    from lightning_safusion.bench.run import run_bench
    from lightning_safusion.demo import run_demo
    from lightning_safusion.profiling.trace import trace
    from lightning_safusion.report.page import report
    from lightning_safusion.simulate.report import run_plan
    from lightning_safusion.systems import print_systems

    commands: dict[str, Callable[..., Any]] = {
        "demo": run_demo,
        "plan": run_plan,
        "bench": run_bench,
        "systems": print_systems,
        "trace": trace,
        "report": report,
    }
    parser = ArgumentParser(prog="safusion", description="Sparsification ahead of tensor fusion.", version=__version__)
    subcommands = parser.add_subcommands()
    for name, function in commands.items():
        subparser = ArgumentParser()
        subparser.add_function_arguments(function, as_group=False, as_positional=True)
        subcommands.add_subcommand(name, subparser, help=(function.__doc__ or "").partition("\n")[0])
    return parser, commands


if __name__ == "__main__":
    main()
