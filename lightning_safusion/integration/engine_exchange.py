"""The engine as the exchange of a wrapped model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.announce import announce
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.fusion.build import JobTraits, build_engine, left_to_torch
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Observer
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB, DDPHook, GradientHook, Relay
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration.environment_checks import missing_on_cuda
from lightning_safusion.integration.exchange import Choice, GradientExchange, Mode
from lightning_safusion.integration.momentum import MomentumSwitch
from lightning_safusion.integration.optimizer import (
    caution,
    fit_to_optimizers,
    refuse_double_momentum,
    refuse_lost_epsilon,
    suit_density,
)
from lightning_safusion.integration.parameters import dense_parameters, sparse_parameters
from lightning_safusion.integration.units import compares_updates
from lightning_safusion.kernels import cpu
from lightning_safusion.sparsify.memory.momentum import AutoEF21Memory
from lightning_safusion.sparsify.schedule import ConstantDensity, SuitedDensity

#: What torch.compile takes for the bucket size when it splits graphs; the real buckets hold one parameter each.
COMPILE_BUCKET_BYTES = 25 * 1024 * 1024


class EngineExchange(GradientExchange):
    """The engine below DDP's communication hook. Making one is collective.

    Args:
        settings: Of the engine.
        specs: The dense gradients, in registration order.
        choice: Whether the engine sends everything.
        transport: Communicator of the buffers.
        device: Where gradients live.
        traits: Of the job: its node and hosts, and whether plain DDP can take the engine's place. The others follow.
        options: Arguments of DistributedDataParallel.
        automatic: Every tensor gets a gradient on all workers in each step, as in automatic optimization.
        observers: Get the events of every window.
        untrained: Names and parameters with dense gradients that no optimizer has; they are not among the specs.
        averages: Average gradients that no optimizer has; else they become 0. Default: unless ``automatic``.
    """

    engine: Engine

    def __init__(
        self,
        settings: EngineSettings,
        specs: Sequence[TensorSpec],
        choice: Choice,
        transport: Transport,
        device: torch.device,
        traits: JobTraits,
        options: Mapping[str, Any],
        automatic: bool,
        observers: list[Observer],
        untrained: Sequence[tuple[str, Tensor]] = (),
        averages: bool | None = None,
    ) -> None:
        self._choice = choice
        self._hook: GradientHook | None = None
        self._static_graph = bool(options.get("static_graph"))
        self._params: list[Tensor] = []  # by registration index
        self._untrained, self._averages = list(untrained), not automatic if averages is None else averages
        self.switches: list[MomentumSwitch] = []  # of optimizers whose momentum the memory carries
        self._fades = False  # the memory has a momentum
        self.settings = settings = _dense(settings, choice) if choice.mode is Mode.DENSE_ENGINE else settings
        if device.type == "cpu" and not cpu.usable():
            announce("there are no compiled kernels, so NumPy selects; installed with a C compiler it is faster")
        overlap = not options.get("find_unused_parameters")
        # every tensor has a gradient on all ranks in each step: the host need not wait for an exchange
        never_waits = device.type == "cuda" and transport.stream_ordered and automatic
        deferred = overlap and not self._static_graph and never_waits
        measure = not torch.are_deterministic_algorithms_enabled()
        traits = replace(traits, measure=measure, overlap=overlap, deferred=deferred)
        with during("set-up, when workers make their communicators and measure the links between them"):
            self.engine = build_engine(settings, specs, transport, device, traits, announce)
        if device.type == "cuda":
            for line in missing_on_cuda(settings, self.engine.space.collective, transport):
                announce(line)
            self._say_what_torch_does(specs)
        self.engine.bind(observers=observers)

    def _say_what_torch_does(self, specs: Sequence[TensorSpec]) -> None:
        """One line, where buffers have no fused kernels; of some buffers only they are known when one is sent."""
        if not self.engine.fused.serves:
            why = "Triton, which needs a C compiler, cannot start here"
        elif found := left_to_torch(self.settings, specs, self.engine.space.collective):
            why = f"there are no fused kernels for {' and '.join(found)}"
        else:
            self.engine.fused.announce = announce
            return
        announce(f"PyTorch's operations, which sort all elements of a buffer, select on the device, because {why}")

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        size = options.get("bucket_cap_mb") or OWN_BUCKETS_MB
        return options | {"bucket_cap_mb": size, "gradient_as_bucket_view": True}

    def register(self, ddp: DistributedDataParallel, relay: Relay | None = None) -> None:
        """See :meth:`GradientExchange.register`; ``relay``: DDP's hook, if it has one."""
        ddp.bucket_bytes_cap = COMPILE_BUCKET_BYTES
        left = {id(param) for _, param in self._untrained}
        params = [param for _, param in dense_parameters(ddp.module) if id(param) not in left]
        hook = DDPHook(
            self.engine,
            params,
            sparse_parameters(ddp.module),
            self._static_graph,
            untrained=self._untrained,
            averages=self._averages,
        )
        if relay is None:
            ddp.register_comm_hook(None, hook.run)
        else:
            relay.target = hook.run
        self.use(hook, params)

    def use(self, hook: GradientHook, params: Sequence[Tensor]) -> None:
        """Gradients come from this hook; ``params``: by registration index."""
        self._hook, self._params = hook, list(params)

    def bind(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None = None) -> None:
        self._close_switches()
        for optimizer in optimizers:
            refuse_double_momentum(self.settings.memory, optimizer)
            if self._choice.mode is Mode.ENGINE and self.settings.density.lasting() != 1:
                refuse_lost_epsilon(optimizer)
        if self._hook is None:
            return
        # the factor as it is on the device: get_scale() would wait for it
        self.engine.bind(loss_scale=None if scaler is None else scaler._get_scale_async)
        self._hook.watch(optimizers)
        settings = self.settings
        if isinstance(settings.density, SuitedDensity):
            suit_density(settings.density, settings.memory, optimizers, compares_updates(settings, optimizers))
        self.switches, self._fades, note = fit_to_optimizers(
            [self.engine], settings, optimizers, self._params, self._hook.selected_from
        )
        if note:
            announce(note)

    def cautions(self, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
        memory, density = self.settings.memory, self.settings.density
        if self._choice.mode is not Mode.ENGINE or not isinstance(density, ConstantDensity):
            return ()
        notes = [caution(memory, density.density, optimizer, self._fades) for optimizer in optimizers]
        return tuple(dict.fromkeys(filter(None, notes)))

    def begin_batch(self) -> None:
        self.engine.begin_batch()

    def begin_backward(self, epoch: int) -> None:
        self.engine.begin_backward(epoch)

    def end_backward(self, synchronised: bool) -> None:
        if self._hook is not None:
            self._hook.check_complete(synchronised=synchronised)

    def settle_optimizers(self) -> None:
        for switch in self.switches:
            switch.settle()

    def abandon(self) -> None:
        self.engine.reset()
        self._close_switches()

    def close(self) -> None:
        if self._hook is not None:
            self._hook.close()
        self._close_switches()
        self._params, self._untrained = [], []

    def _close_switches(self) -> None:
        for switch in self.switches:
            switch.close()
        self.switches = []
        self.engine.space.selector.units = None  # it holds the optimizers


def _dense(settings: EngineSettings, choice: Choice) -> EngineSettings:
    """A checkpoint's residual leaves with the first gradients, then this is plain DDP in all but name."""
    announce(f"all gradients and the residual of a checkpoint are sent dense, because {choice.reason}")
    settings = replace(settings, density=ConstantDensity(1.0))
    if isinstance(settings.memory, AutoEF21Memory):  # optimizers keep their momentum
        settings = replace(settings, memory=AutoEF21Memory(0.0))
    return settings
