"""Engines with the default's parts on one device, without a model: gradients are drawn, other workers echo this one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.gpu.device import Device
from lightning_safusion.comm.transport.interface import FinishedWork, ReduceOp, Transport, Work, group_of
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.plans.policy import Aligned
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.sparsify.selection.units import Moment, UpdateUnits
from lightning_safusion.systems.rows import DEFAULT, EngineSystem, resolve_system
from lightning_safusion.systems.settings import engine_settings
from lightning_safusion.tools.plan.traces import resolve_trace

#: Share of the elements that all stages send: the default's with Adam.
DENSITY = 0.02
#: Buffers of a window.
BUFFERS = 4
#: Gradients that are drawn for windows that are timed: with the same ones again and again, or with means in their
#: place, a residual has the same largest elements for ever.
SETS = 4
#: Windows after which those that record when everything happened are one in 16, and the number of one before such.
SETTLED, _BEFORE_RECORDED = 65, 79
_SMALL = ((12, 10), (40,), (25, 8), (3,), (30, 6))
# About 1.5 million elements: a few milliseconds of a CPU, and enough for a device to be late.
_MIDDLE = ((1000, 512), (512,), (512, 512), (3,), (700, 700), (700,), (90, 200), (200_000,), (1000,), (17,))


class Echo(SoloTransport):
    """One of several workers that all send what this one sends.

    Args:
        world_size: Workers.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.view(self.world_size, -1).copy_(tensor.view(1, -1).expand(self.world_size, -1))
        return FinishedWork()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if op == "sum":
            tensor.mul_(self.world_size)
        return FinishedWork()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        return Echo(len(group_of(0, groups, self.world_size)))


def shapes_of(rehearse: bool) -> list[tuple[int, ...]]:
    """Those of BERT-base; in a rehearsal of a few small tensors."""
    return list(_SMALL) if rehearse else [tuple(tensor.shape) for tensor in resolve_trace("bert-base").tensors]


def middle_shapes(rehearse: bool) -> list[tuple[int, ...]]:
    """Those of a model that draws and compares its numbers on the host; in a rehearsal of a few small tensors."""
    return list(_SMALL if rehearse else _MIDDLE)


def described(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, dense: Sequence[int] = ()
) -> list[TensorSpec]:
    """Tensors of these shapes; some of them dense, by their numbers."""
    return [TensorSpec(f"t{i}", i, shape, math.prod(shape), dtype, i in dense) for i, shape in enumerate(shapes)]


def default_settings(tensors: int, **given: Any) -> EngineSettings:
    """The default's settings as they are with Adam, in a fixed number of buffers; always sparse.

    Args:
        tensors: Of the model.
        given: Other parts.
    """
    parts = {"collective": "allgather", "memory": "decoupled", "fusion": Aligned(-(-tensors // BUFFERS))} | given
    row = resolve_system(DEFAULT)
    assert isinstance(row, EngineSystem)
    return engine_settings(row, DENSITY, parts)


def drawn_sets(sizes: Sequence[int], device: torch.device) -> list[list[Tensor]]:
    """:data:`SETS` of gradients of these sizes, drawn on the device."""
    generator = torch.Generator(device).manual_seed(23)
    return [[torch.randn(size, device=device, generator=generator) for size in sizes] for _ in range(SETS)]


def overlap(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Share of the elements that one window has sent among those of another, by the means of both."""
    ours, theirs = (torch.cat([grad.flatten() != 0 for grad in grads]) for grads in (first, second))
    return float((ours & theirs).sum() / ours.sum().clamp(min=1))


class Job:
    """An engine, and the gradients that it gets.

    Args:
        place: Where it runs.
        specs: Its tensors.
        transport: To the other workers.
        deferred: The device ends the windows; else the host.
        fused: With fused kernels, else with torch's operations; by default where the device ends the windows.
        by_update: Elements are compared by how far the optimizer would move them.
        given: Parts in place of the default's.
    """

    def __init__(
        self,
        place: Device,
        specs: Sequence[TensorSpec],
        transport: Transport,
        deferred: bool = True,
        by_update: bool = True,
        fused: bool | None = None,
        **given: Any,
    ) -> None:
        self.specs, self.device, self.settings = list(specs), place.device, default_settings(len(specs), **given)
        self.engine = build_engine(
            self.settings, self.specs, transport, self.device, JobTraits(measure=False, deferred=deferred)
        )
        fused = deferred if fused is None else fused
        if not (fused and place.cuda):
            self.engine.fused.serves = fused  # in the interpreter too
        self.grads = [torch.zeros(spec.numel, dtype=spec.dtype, device=self.device) for spec in self.specs]
        if by_update:
            generator = torch.Generator().manual_seed(17)
            drawn = [torch.rand(spec.numel, generator=generator).mul_(1e-3) for spec in self.specs]
            moments = [Moment(values.to(self.device), 1e-8) for values in drawn]
            self.engine.space.compare_in(
                UpdateUnits(lambda indices: [moments[index] for index in indices], self.device)
            )

        self._sets: list[list[Tensor]] = []
        self._refreshed = 0

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(spec.numel for spec in self.specs)

    def refresh(self) -> None:
        """Other gradients than in the last windows, on the device; without a wait for it, but for the first time."""
        if not self._sets:
            self._sets = drawn_sets([spec.numel for spec in self.specs], self.device)
        torch._foreach_copy_(self.grads, self._sets[self._refreshed % SETS])
        self._refreshed += 1

    def settle(self, windows: int = SETTLED) -> None:
        """Windows of other gradients, until those that record everything are one in 16: the second after these is one.

        Args:
            windows: So many; fewer are taken for as many.
        """
        for _ in range(windows):
            self.refresh()
            self.window()
        self.engine.windows = _BEFORE_RECORDED

    def draw(self, seed: int) -> None:
        """New gradients, the same on every device; without a wait for one."""
        generator = torch.Generator().manual_seed(seed)
        flat = torch.randn(self.numel, generator=generator)
        for spec, grad, part in zip(self.specs, self.grads, flat.split([s.numel for s in self.specs]), strict=True):
            grad.copy_(part.mul_(10.0 ** (spec.index % 4 - 2)))

    def push(self, number: int | None = None) -> None:
        """Gives the engine the last ``number`` tensors, from the last to the first; all by default."""
        for spec in self.specs[::-1][:number]:
            self.engine.push(spec.index, self.grads[spec.index])

    def window(self) -> None:
        """One backward pass."""
        self.push()
        self.engine.drain()

    def warm(self, windows: int = 4) -> None:
        """So many windows, after which orders, plans and kernels are known; means are the next one's gradients, so that
        times of further windows are none of a training."""
        self.draw(0)
        for _ in range(windows):
            self.window()

    def means(self) -> Tensor:
        """float32 [N], what the gradients have become, on the host."""
        return torch.cat([grad.float().cpu() for grad in self.grads])

    def residual(self) -> Tensor:
        """float32 [N], on the host, by registration."""
        layout = self.engine.space.layout
        held = self.settings.memory.accumulated(0, self.numel).cpu()
        places = [layout.places[spec.index] for spec in self.specs]
        return torch.cat([held[layout.edges[place] : layout.edges[place + 1]] for place in places])
