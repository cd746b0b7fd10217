"""What the engine's own work costs the CPU, with and without compiled kernels, beside a plain copy of the gradients.

    $ python -m lab native
    $ python -m lab native --models transformer --systems saf-pooled --densities 0.01,0.05

Two virtual workers of one process train a network of `python -m lab bench` on random data. Turns of a few steps with
and without the kernels alternate, and the first steps of a turn are left out. A window is what one worker does with its
gradients: adding them to the residual, selection, packing, decoding and taking out what was sent; no exchange is in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from lab.bench.workload import Classifier
from lab.markdown import line, markdown
from lab.virtual.training import taken_gradients
from lab.virtual.workers import Engines
from lightning_safusion import SAFusionStrategy
from lightning_safusion.kernels import cpu as native
from lightning_safusion.tools.bench.rows import parse_row

TURN, LEFT_OUT = 6, 2  # steps


def compiled(
    models: Sequence[str] = ("conv", "transformer"),
    systems: Sequence[str] = ("safusion", "saf-pooled"),
    densities: Sequence[float] = (0.01, 0.05),
    turns: int = 8,
) -> None:
    """What the engine's own work costs the CPU with and without compiled kernels, beside a copy of the gradients.

    Args:
        models: Of "conv", "transformer" and "lstm".
        systems: Names of systems, with options.
        densities: Shares of the elements that are sent.
        turns: Turns of six steps, 4 or more, half of them without the kernels; the first two warm up.

    Raises:
        ValueError: If there are too few turns.
        RuntimeError: If there are no compiled kernels.
    """
    if turns < 4:
        raise ValueError(f"turns is {turns}: give 4 or more, the first two warm up")
    if not native.usable():
        raise RuntimeError("the package was installed without a C compiler: there is nothing to compare")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    print(markdown(("model", "system", "density", "copy, ms", "compiled, ms", "copies", "NumPy, ms", "ratio"), (), 2))
    for model in models:
        for system in systems:
            for density in densities:
                with_kernels, plain, copy = measure(model, system, density, turns)
                figures = f"{copy:.1f}", f"{with_kernels:.1f}", f"{with_kernels / copy:.1f}", f"{plain:.1f}"
                print(line((model, f"`{system}`", f"{density:g}", *figures, f"{with_kernels / plain:.2f}")), flush=True)


def measure(model: str, system: str, density: float, turns: int) -> tuple[float, float, float]:
    """Median milliseconds of a window with and without the kernels, and of a copy of the gradients."""
    torch.manual_seed(0)
    module = Classifier(model, "base", 16 if model == "conv" else 8)
    specs = strategy_of(system, density).gradient_specs(module)
    optimizer, parameters = module.configure_optimizers(), list(module.parameters())
    order = list(range(len(specs)))[::-1]
    engines = Engines(lambda: strategy_of(system, density).settings, specs, order, 2, optimizers=[optimizer])
    engines.carry_momentum([optimizer], parameters)
    windows: dict[bool, list[float]] = {True: [], False: []}
    copies: list[float] = []
    target = [torch.zeros(parameter.numel()) for parameter in parameters]
    for step in range(turns * TURN):
        gradients = [backward(module, parameters) for _ in range(2)]
        copies.append(timed(partial(torch._foreach_copy_, target, gradients[0]), nullcontext()))
        compiled = step // TURN % 2 == 0
        context = nullcontext() if compiled else native.unused()
        seconds = timed(partial(engines.average, gradients), context) / len(gradients)
        if step >= 2 * TURN and step % TURN >= LEFT_OUT:
            windows[compiled].append(seconds)
        for parameter, gradient in zip(parameters, gradients[0], strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    on, off, copy = (1e3 * statistics.median(times) for times in (windows[True], windows[False], copies))
    return on, off, copy


def strategy_of(row: str, density: float) -> SAFusionStrategy:
    """The strategy of a row, sparse at any cost."""
    return parse_row(row).strategy(density, collective="allgather")


def backward(module: Classifier, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Flat gradients of one worker's batch."""
    module.training_step(module.batch(), 0).backward()
    return [gradient.clone() for gradient in taken_gradients(parameters)]


def timed(work: Callable[[], object], context: AbstractContextManager[None]) -> float:
    """Seconds that the work takes."""
    with context:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
