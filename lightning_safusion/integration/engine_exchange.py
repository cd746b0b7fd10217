"""The engine as the exchange of a wrapped model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.fusion.build import build_engine
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Observer
from lightning_safusion.fusion.hook import DDPHook
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration.exchange import Choice, GradientExchange, Mode
from lightning_safusion.integration.optimizer import MomentumSwitch, carry_momentum
from lightning_safusion.integration.parameters import (
    cautions,
    dense_parameters,
    refuse_double_momentum,
    sparse_parameters,
)
from lightning_safusion.kernels import cpu
from lightning_safusion.sparsify.schedule import ConstantDensity

# What torch.compile takes for the bucket size when it splits graphs; the real buckets hold one parameter each.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class Surroundings:
    """Where an engine runs.

    Args:
        transport: Communicator of the buffers.
        device: Where gradients live.
        node: Name of the node.
        never_waits: Nothing but the exchange asks the host to wait for the device.
        replaceable: Plain DDP can take the engine's place.
    """

    transport: Transport
    device: torch.device
    node: Hashable
    never_waits: bool
    replaceable: bool


class EngineExchange(GradientExchange):
    """The engine below DDP's communication hook.

    Args:
        settings: What to do with the gradients.
        specs: The dense gradients, in registration order.
        choice: Whether it sends everything.
        where: Where it runs.
        observers: Are told of every window.
    """

    def __init__(
        self,
        settings: EngineSettings,
        specs: Sequence[TensorSpec],
        choice: Choice,
        where: Surroundings,
        observers: list[Observer],
    ) -> None:
        # a checkpoint's residual leaves with the first gradients, then this is plain DDP in all but name
        sends_all = choice.mode is Mode.DENSE_ENGINE
        self.settings = replace(settings, density=ConstantDensity(1.0)) if sends_all else settings
        self.choice = choice
        self.switches: list[MomentumSwitch] = []  # of optimizers whose momentum the memory carries
        self._specs = specs
        self._where = where
        self._observers = observers
        self.built: Engine | None = None  # once registered
        self._hook: DDPHook | None = None
        self._told = ""

    @property
    def engine(self) -> Engine:
        """The engine, once registered."""
        if self.built is None:
            raise RuntimeError("the engine is built when the exchange is registered on a wrapped model")
        return self.built

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        options = options | {"gradient_as_bucket_view": True}
        if options.get("bucket_cap_mb") is None:
            options["bucket_cap_mb"] = 0  # every parameter has a bucket, and hence a call of the hook, of its own
        self._overlap = not options.get("find_unused_parameters")
        self._static_graph = bool(options.get("static_graph"))
        return options

    def register(self, ddp: DistributedDataParallel) -> None:
        where, module = self._where, ddp.module
        ddp.bucket_bytes_cap = _COMPILE_BUCKET_BYTES
        if self.choice.mode is Mode.DENSE_ENGINE:
            announce(f"all gradients and the residual of a checkpoint are sent dense, because {self.choice.reason}")
        if where.device.type == "cpu" and not cpu.usable():
            announce("there are no compiled kernels, so NumPy selects; installed with a C compiler it is faster")
        with during("set-up, when workers make their communicators and measure the links between them"):
            self.built = build_engine(
                self.settings,
                self._specs,
                where.transport,
                where.device,
                measure=not torch.are_deterministic_algorithms_enabled(),
                announce=announce,
                overlap=self._overlap,
                deferred=self._overlap and not self._static_graph and where.never_waits,
                node=where.node,
                yields=where.replaceable,
            )
        self.built.observers = self._observers
        params = [param for _, param in dense_parameters(module)]
        self._hook = DDPHook(self.built, params, sparse_parameters(module), self._static_graph)
        ddp.register_comm_hook(None, self._hook.run)

    def bind(self, optimizers: Sequence[Optimizer], loss_scale: Callable[[], Tensor | None] | None = None) -> None:
        """Ties the engine to what exists only after the model was wrapped: optimizers and the loss scaler.

        Args:
            optimizers: Of the trainer.
            loss_scale: Factor of the loss on the device; None without a scaler.

        Raises:
            MisconfigurationException: If memory and optimizer would both apply a momentum.
        """
        self._leave_momentum()
        for optimizer in optimizers:
            refuse_double_momentum(self.settings.memory, optimizer)
        if self._hook is None:
            return
        if loss_scale is not None:
            self.engine.loss_scale = loss_scale
        for optimizer in optimizers:
            self._hook.watch(optimizer)
        memories, density = [self.settings.memory], self.settings.density
        self.switches, said = carry_momentum(memories, density, optimizers, self._hook.selected_from)
        if said and said != self._told:
            announce(said)
        self._told = said

    def caution(self, optimizers: Sequence[Optimizer]) -> None:
        """Says what is known to cost accuracy with these optimizers."""
        density = self.settings.density
        if self.choice.mode is Mode.ENGINE and isinstance(density, ConstantDensity):
            for note in cautions(self.settings.memory, density.density, optimizers, bool(self.switches)):
                announce(note)

    def begin_batch(self) -> None:
        self.engine.let_go()

    def begin_backward(self, epoch: int) -> None:
        self.engine.epoch = epoch

    def end_backward(self, synchronised: bool) -> None:
        if self._hook is not None:
            self._hook.check_complete(synchronised=synchronised)

    def abandon(self) -> None:
        if self.built is not None:
            self.built.reset()
        self._leave_momentum()

    def close(self) -> None:
        if self._hook is not None:
            self._hook.close()
        self._leave_momentum()

    def _leave_momentum(self) -> None:
        """Leaves optimizers as they were made."""
        for switch in self.switches:
            switch.close()
        self.switches = []


def announce(text: str) -> None:
    """Says one line, on rank 0."""
    rank_zero_info(f"SAFusionStrategy: {text}.")
