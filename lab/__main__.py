"""The studies, as subcommands: ``python -m lab STUDY --help``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

#: Each study: the function that runs it, and what it shows, in a line.
STUDIES = {
    "accuracy": ("lab.accuracy.study:accuracy", "How long systems train until they are nearly as good as DDP."),
    "convergence": ("lab.convergence.study:convergence", "Accuracy by scope, density, memory and optimizer."),
    "missing-rate": ("lab.missing_rate:missing_rate", "Tensors that go missing, and accuracy, by fusion degree."),
    "perplexity": ("lab.perplexity:perplexity", "Learning curves of a small LSTM under DDP and SAFusion."),
    "hook": ("lab.hook:hook", "What a gradient pays for passing through the hook."),
    "bench": ("lab.bench.run:bench", "Systems side by side on CPU workers, over links of a given rate (Linux, root)."),
    "hsdp": ("lab.hsdp:hsdp", "FSDP2 inside of machines, dense and sparse between them (Linux, root)."),
    "hsdp-loss": ("lab.hsdp_loss:hsdp_loss", "The loss with FSDP2 inside of nodes, dense and sparse between them."),
    "turns": ("lab.turns:turns", "Rows of a benchmark in turns against each row alone (links: Linux, root)."),
    "window": ("lab.window:window", "What one steady window passes through: modules, functions and Python calls."),
    "numerics": ("lab.numerics:numerics", "Hashes of trained parameters, for every system: what must not change."),
    "attack": ("lab.attack.study:attack", "Attacks on real jobs: lost workers, damage, disagreement, and what held."),
    "soak": ("lab.attack.soak:soak", "Long trainings: whether memory, files and threads stay level."),
    "lightning-suite": (
        "lab.lightning_suite:lightning_suite",
        "Lightning's own tests of DDP, with SAFusion in its place.",
    ),
    "native": ("lab.native:compiled", "What the engine costs the CPU with and without compiled kernels."),
    "formats": ("lab.formats:formats", "Size of messages by layout, and the time to write and to read them."),
    "selection": ("lab.selection:selection", "Time of selection before fusion against selection after it."),
    "kernels": ("lab.kernels.study:kernels", "What GPU compilers make of the kernels, by version of Triton."),
    "launches": ("lab.kernels.launches:launches", "What the host takes to start a kernel, without a device."),
    "gpu": ("lab.gpu.command:gpu", "What a GPU must show, in stages, each figure beside its budget."),
    "callbacks": ("lab.callbacks:callbacks", "What the callbacks cost."),
    "tuner": ("lab.tuner:tuner", "BufferSizeTuner over a link of known rate (Linux, root)."),
    "simulator": ("lab.simulator:simulator", "The simulator against measurement (Linux, root)."),
    "planners": ("lab.planners:planners", "How far published planners are from the best plan."),
    "break-even": ("lab.break_even:break_even_tables", "From where on DDP is as good as the default."),
    "picture": ("lab.picture:picture", "The pictures of the README and the results, from the documents' tables."),
    "systems": ("lab.systems:write_tables", "Writes the tables of docs/systems.md and docs/limits.md anew."),
    "traces": ("lab.architectures:traces", "Writes the traces that the simulator ships."),
    "papers": ("lab.papers.command:papers", "The seven experiments of SAFusion's slides, beside what they claim."),
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs a study.

    Args:
        args: Its name and options; those of the process by default.
    """
    about = "Studies of lightning_safusion; several values of an option stand between commas."
    given = sys.argv[1:] if args is None else list(args)
    if given[:1] == ["gpu"]:
        from lab.gpu.command import main as gpu  # without jsonargparse, which a machine with a GPU may not have

        gpu(given[1:])
    else:
        from safusion_command import run

        run("python -m lab", about, STUDIES, given)


if __name__ == "__main__":
    main()
