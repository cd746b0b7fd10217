"""The part of the strategy that wraps the model and ties the engine to it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_safusion import native
from lightning_safusion.agreement import ddp_options, training_options
from lightning_safusion.comm.horovod_transport import HorovodTransport
from lightning_safusion.comm.torch_transport import TorchTransport, default_transport
from lightning_safusion.comm.transport import Transport, during
from lightning_safusion.ddp_hooks import DDPHookName, ddp_hook_options, register_ddp_hook
from lightning_safusion.dear import Dear
from lightning_safusion.elastic import ElasticAverage
from lightning_safusion.environments.horovod import check_horovod
from lightning_safusion.fusion.ddp import DDPHook
from lightning_safusion.fusion.engine import build_controller, check_equal, fingerprint
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.state import carried, carry_on
from lightning_safusion.momentum import MomentumSwitch, carry_momentum
from lightning_safusion.observed import ObservedDDPStrategy
from lightning_safusion.parameters import (
    cautions,
    check_same_trainable,
    dense_parameters,
    refuse_double_momentum,
    sparse_parameters,
    trainable,
)
from lightning_safusion.signals import DeferredSignals
from lightning_safusion.sparsify.schedule import ConstantDensity

# What torch.compile takes for the bucket size when it splits graphs; the real buckets hold one parameter each.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024


class EngineDDPStrategy(ObservedDDPStrategy):
    """DDP whose gradients an engine exchanges, for as long as that pays; plain DDP otherwise.

    Args:
        dense: Shell patterns of parameter names that always travel dense.
        dense_below: Tensors of fewer elements than this travel dense.
        dense_below_ndim: Tensors of fewer dimensions than this travel dense.
        over_horovod: Horovod carries the gradients.
        ddp_hook: DDP with this communication hook, in place of the engine.
        elastic: Workers train on their own, held together by a centre.
        kwargs: Arguments of DDPStrategy.
    """

    def __init__(
        self,
        dense: list[str],
        dense_below: int,
        dense_below_ndim: int,
        over_horovod: bool,
        ddp_hook: DDPHookName | None = None,
        elastic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._ddp_hook = ddp_hook
        self._is_elastic = elastic
        self._elastic: ElasticAverage | None = None
        self._dear: Dear | None = None
        self._dense = dense
        self._dense_below = dense_below
        self._dense_below_ndim = dense_below_ndim
        self._over_horovod = over_horovod
        self._transport: Transport | None = None
        self._hook: DDPHook | None = None
        self._signals: DeferredSignals | None = None
        self._told_of_momentum = ""
        self._wrapped: list[tuple[str, nn.Parameter]] = []  # trainable parameters that DDP knows
        self._dense_for_good: str | None = None  # why plain DDP goes on where the engine has begun
        self._switches: list[MomentumSwitch] = []  # of optimizers whose momentum the memory carries
        self._costs_followed = 0  # windows when costs were last looked at
        self._sends_all: str | None = None  # why the engine does that, instead of stepping aside

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wraps the model so that every parameter has a bucket, and hence a call of the hook, of its own."""
        if torch._dynamo.config.optimize_ddp == "python_reducer":
            raise MisconfigurationException(
                "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's buckets, which this strategy "
                "works on; set it to True (the default) or False."
            )
        self._ended = None
        self._wrapped = trainable(model)
        specs = self.gradient_specs(model)
        self._transport = self._make_transport(model)
        entry = self._resumed[1] if self._resumed is not None else {}
        checked = {"system": self.system, "checkpoint": str(entry.get("nonce"))} | ddp_options(self._ddp_kwargs)
        checked |= {"sync_batchnorm": str(self._layer_sync is not None)}
        # in front of the tensors, of which thousands may differ as well
        check_equal(self._transport, checked | fingerprint(self.settings, specs))
        reason = self._dense_for_good or self.settings.dense_reason(specs, self._transport.world_size)
        # DDP's own group is for control where Horovod carries the gradients: those it carries even when all are sent
        by_engine = self._over_horovod and self._transport.world_size > 1
        needed = bool(by_engine or entry.get("holds_back") or self._sends_all) and self._dense_for_good is None
        self._aside, self._sends_all = (None, reason) if needed else (reason, None)
        if not specs:
            self._aside = "no parameter has a dense gradient"
        options = dict(self._ddp_kwargs)
        if self._ddp_hook is not None:
            self._aside, self._sends_all = f"system={self.system!r} is DDP with another hook", None
            wanted = ddp_hook_options(self._ddp_hook, options.get("process_group"))
            # LightningCLI passes every option with its default
            options |= {name: value for name, value in wanted.items() if options.get(name) in (None, False)}
        if self._aside is None:
            options["gradient_as_bucket_view"] = True
            if options.get("bucket_cap_mb") is None:
                options["bucket_cap_mb"] = 0
        # On the current stream, whatever the Lightning version: gradient hooks run on the stream of this construction
        with during("set-up, when DDP compares and copies the parameters"):
            ddp = DistributedDataParallel(module=model, device_ids=self.determine_ddp_device_ids(), **options)
        if self._aside is None:
            ddp.bucket_bytes_cap = _COMPILE_BUCKET_BYTES
        return ddp

    def _make_transport(self, model: nn.Module) -> Transport:
        if self._over_horovod:
            transport = HorovodTransport()
            check_horovod(model, transport.world_size, self.world_size)
            return transport
        group = self._ddp_kwargs.get("process_group")
        return default_transport(self._timeout) if group is None else TorchTransport(group, self._timeout)

    @override
    def _register_ddp_hooks(self) -> None:
        """Registers the hook on every device; DDPStrategy does so on CUDA only, and would train dense elsewhere."""
        if self._aside is not None:
            rank_zero_info(f"SAFusionStrategy: plain DDP is used, because {self._aside}.")
            if self._ddp_hook is not None and isinstance(self.model, DistributedDataParallel):
                register_ddp_hook(self.model, self._ddp_hook, self._ddp_kwargs.get("process_group"))
            if self._is_elastic and self._transport is not None:
                self._elastic = ElasticAverage(self._transport)
            if self._ddp_hook == "dear":
                self._register_dear()
            return
        if not isinstance(self.model, DistributedDataParallel) or self._transport is None:
            raise RuntimeError("hooks are registered on the wrapped model: call _setup_model first")
        module = self.model.module
        overlap = not self._ddp_kwargs.get("find_unused_parameters")
        static_graph = bool(self._ddp_kwargs.get("static_graph"))
        deferred = overlap and not static_graph and self._never_waits()
        measure = not torch.are_deterministic_algorithms_enabled()
        settings = self.settings
        if self._sends_all is not None:
            # what the checkpoint has held back leaves with the first gradients, then this is plain DDP in all but name
            settings = replace(settings, density=ConstantDensity(1.0))
            _announce(f"gradients travel whole, because {self._sends_all}; so does what a checkpoint has held back")
        if self.root_device.type == "cpu" and not native.usable():
            _announce("there are no compiled kernels, so NumPy selects; installed with a C compiler it is faster")
        with during("set-up, when workers make their communicators and measure the links between them"):
            self._controller = build_controller(
                settings,
                self.gradient_specs(module),
                self._transport,
                self.root_device,
                measure,
                _announce,
                overlap,
                deferred,
                self.node_rank,
                yields=not self._over_horovod,
            )
        self._controller.observers = self._observers
        params = [param for _, param in dense_parameters(module)]
        self._hook = DDPHook(self._controller, params, sparse_parameters(module), static_graph)
        self.model.register_comm_hook(None, self._hook.run)

    def _register_dear(self) -> None:
        if isinstance(self.model, DistributedDataParallel) and self._transport is not None:
            module = self.model.module
            params = [param for _, param in trainable(module)]
            self._dear = Dear(module, params, self._transport, bool(self._ddp_kwargs.get("static_graph")))
            self.model.register_comm_hook(None, self._dear.run)

    def _never_waits(self) -> bool:
        """Whether nothing asks the host to wait for an exchange: every tensor has a gradient on all ranks each step."""
        streams = self.root_device.type == "cuda" and self._transport is not None and self._transport.stream_ordered
        return streams and self.lightning_module is not None and self.lightning_module.automatic_optimization

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._compare_training(trainer)
        self._bind()
        self._leave_to_ddp()
        density = self.settings.density
        if self._controller is not None and self._sends_all is None and isinstance(density, ConstantDensity):
            for note in cautions(self.settings.memory, density.density, self.optimizers, bool(self._switches)):
                _announce(note)

    def _compare_training(self, trainer: Trainer) -> None:
        """Refuses options of the trainer and hyperparameters that differ between workers: replicas would part."""
        if self._transport is None or trainer.state.fn != TrainerFn.FITTING:
            return
        # workers that train on their own may do so each in its own way
        optimizers = [] if self._is_elastic else self.optimizers
        check_equal(self._transport, training_options(trainer, self.lightning_module, optimizers))

    def _leave_to_ddp(self) -> None:
        """Uses plain DDP under an optimizer that compares gradients of several passes: some would be sparse."""
        if self._controller is None or self._sends_all is not None or self._ddp is None:
            return
        if not any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            return
        if self._over_horovod:
            raise MisconfigurationException(
                "LBFGS compares the gradients of several backward passes, which must all be whole: with "
                "transport='horovod' use density=1.0."
            )
        self._go_plain("LBFGS compares the gradients of several backward passes, which must all be whole")

    def _go_plain(self, reason: str) -> None:
        """Goes on with plain DDP; nothing is held back."""
        if self._ddp is None:
            return
        self._dense_for_good = reason
        self._wrap_again(self._ddp.module, keep=False)
        self.settings.memory.bind([0], self.root_device)

    def _bind(self) -> None:
        """Ties the engine to what exists only after the model was wrapped: optimizers and the loss scaler."""
        self._leave_momentum()
        for optimizer in self.optimizers:
            refuse_double_momentum(self.settings.memory, optimizer)
        if self._hook is None or self._controller is None:
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            # the factor as it is on the device: get_scale() would wait for it
            self._controller.loss_scale = scaler._get_scale_async
        for optimizer in self.optimizers:
            self._hook.watch(optimizer)
        self._carry_momentum(self._hook)

    def _carry_momentum(self, hook: DDPHook) -> None:
        """Has the memory carry the momentum of the optimizers, if it does so for these."""
        density = ConstantDensity(1.0) if self._sends_all is not None else self.settings.density
        memories = [self.settings.memory]
        self._switches, said = carry_momentum(memories, density, self.optimizers, hook.selected_from)
        if said and said != self._told_of_momentum:
            _announce(said)
        self._told_of_momentum = said

    def _leave_momentum(self) -> None:
        """Leaves optimizers as they were made."""
        for switch in self._switches:
            switch.close()
        self._switches = []

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        """The wrapped model, also where it has been compiled since; None outside training."""
        model = getattr(self.model, "_orig_mod", self.model)
        return model if isinstance(model, DistributedDataParallel) else None

    @property
    def _epoch(self) -> int:
        return self.lightning_module.current_epoch if self.lightning_module is not None else 0

    def _follow_trainable(self) -> None:
        """Wraps the model anew when parameters were frozen or unfrozen since: DDP knows those of its construction only.

        Raises:
            RuntimeError: If the ranks have different trainable parameters.
        """
        if self._ddp is None or self._transport is None:
            return
        module = self._ddp.module
        names = [name for name, _ in trainable(module)]
        known = dict(self._wrapped)
        replaced = [name for name, param in trainable(module) if known.get(name, param) is not param]
        same = not replaced and names == list(known)
        with during(f"the beginning of epoch {self._epoch}, when workers compare their trainable parameters"):
            everyone = self._transport.gather_objects((names, same))
        check_same_trainable([theirs for theirs, _ in everyone])
        if not all(unchanged for _, unchanged in everyone):
            self._wrap_again(module, replaced)

    def _wrap_again(self, module: nn.Module, replaced: Sequence[str] = (), keep: bool = True) -> None:
        """Wraps the model anew.

        Args:
            module: The model.
            replaced: Parameters that are others than those of their names before: what was held back is not theirs.
            keep: What the engine holds is taken over by the next one.
        """
        had_engine = self._controller is not None
        if self._controller is not None:
            self._controller.settle()
            self._remember(self._controller)
        state = carried(self._controller, replaced) if self._controller is not None and keep else None
        if self._hook is not None:
            self._hook.close()
        if self._dear is not None:
            self._dear.close()
        if self._transport is not None:
            self._transport.close()
        self._hook = self._controller = self._dear = None
        compiles = getattr(self.model, "dynamo_ctx", None)  # what torch.compile was asked to do, if it was
        self.model = module
        gc.collect()  # the old reducer leaves its hooks on the parameters until it is destroyed
        self.model = self._setup_model(module)
        self._register_ddp_hooks()
        if had_engine:
            self._take_over(state)
        self._bind()
        if compiles is not None:
            self.model = compiles(self.model)

    def _take_over(self, state: dict[str, Any] | None) -> None:
        if self._controller is not None and state is not None:
            carry_on(self._controller, state)
        elif self._controller is None and self._signals is not None:
            self._signals.remove()  # there are no messages of ours left that could carry the news

    def _follow_costs(self) -> None:
        """Goes on with plain DDP where every buffer has travelled dense for good: the hook would only cost time."""
        controller = self._controller
        if controller is None or self._over_horovod or self._ddp is None:
            return
        # once after each window: never among the micro-batches of an accumulation, whose gradients are in DDP's buckets
        if controller.windows == self._costs_followed:
            return
        self._costs_followed = controller.windows
        if not controller.step_aside():
            return
        self._deliver_signals(ask=True)
        del controller  # or its buffers would stay as long as the model is wrapped
        self._go_plain("its all-reduce has been predicted to be faster, review after review")

    def _deliver_signals(self, ask: bool = False) -> None:
        """Runs the handlers of signals that some rank was sent, on all ranks alike.

        Args:
            ask: Also those of which no gradients have told yet. Collective.
        """
        controller = self._controller
        if controller is None or self._signals is None:
            return
        if ask and self._transport is not None:
            controller.settle()
            with during(
                f"epoch {self._epoch}, when workers ask each other for signals, after step {controller.windows}"
            ):
                everyone = self._transport.gather_objects(controller.notices)
            for notices in everyone:
                controller.heard |= notices
            controller.notices &= ~controller.heard
        heard, controller.heard = controller.heard, 0
        self._signals.deliver(heard)

    def _release_signals(self) -> None:
        """Leaves signals to Lightning as long as no gradients are exchanged that could carry the news. Collective."""
        self._deliver_signals(ask=True)
        if self._signals is not None:
            self._signals.remove()

    @property
    def dense_rules(self) -> tuple[list[str], int, int]:
        """What travels dense: patterns of names, tensors of fewer elements, tensors of fewer dimensions."""
        return self._dense, self._dense_below, self._dense_below_ndim

    def gradient_specs(self, module: nn.Module) -> tuple[TensorSpec, ...]:
        """The dense gradients of a module as this strategy exchanges them, in registration order."""
        return specs_from_parameters(dense_parameters(module), *self.dense_rules)


def _announce(text: str) -> None:
    rank_zero_info(f"SAFusionStrategy: {text}.")
