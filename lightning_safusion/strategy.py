"""The Lightning strategy: lifecycle only, no tensor arithmetic."""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_safusion.comm.horovod_transport import HorovodTransport
from lightning_safusion.comm.torch_transport import TorchTransport, default_transport
from lightning_safusion.comm.transport import Transport
from lightning_safusion.environments.horovod import check_horovod, configure_horovod
from lightning_safusion.fusion.ddp import DDPHook
from lightning_safusion.fusion.engine import EngineSettings, build_controller, check_equal, fingerprint
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.planning import CollectiveChoice
from lightning_safusion.fusion.policy import FusionPolicy
from lightning_safusion.fusion.quota import QuotaRule, Scope
from lightning_safusion.fusion.registry import resolve_fusion
from lightning_safusion.fusion.report import nothing_exchanged
from lightning_safusion.fusion.state import handover, take_over
from lightning_safusion.parameters import (
    dense_parameters,
    refuse_double_momentum,
    refuse_options,
    sparse_parameters,
    trainable,
)
from lightning_safusion.resumable import ResumableDDPStrategy
from lightning_safusion.signals import DeferredSignals, requeue_signal
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory import Memory, resolve_memory
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.schedule import ConstantDensity, DensitySchedule, resolve_density
from lightning_safusion.systems import resolve_system

# What torch.compile takes for the bucket size when it splits graphs; the real buckets hold one parameter each.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024


class SAFusionStrategy(ResumableDDPStrategy):
    """Distributed data parallel training that sends sparsified gradients.

    Every gradient tensor is sparsified *before* it is fused into a communication buffer, so that no tensor goes
    missing from a buffer; every worker closes a buffer after the same tensors, so that nobody waits; buffer sizes
    follow measured times, so that exchange hides behind backpropagation (SAFusion, HPDC 2025). What is not sent stays
    in a residual and is sent later.

    Arguments left at None take the part of the chosen ``system``.

    Args:
        compressor: Chooses the elements to send: ``"topk"``, ``"randomk"``, ``"threshold"``, ``"dgc"``,
            ``"gaussiank"``, ``"redsync"``, ``"sidco"``, ``"adtopk"``, ``"oktopk"``, ``"none"``, the name of an
            installed one, or a ``Sparsifier``.
        density: Share of the elements to send, in (0, 1], or a ``DensitySchedule``.
        system: A published scheme by name, for example ``"safusion"``, ``"saf-inter"``, ``"saf-naive"``, ``"fgbuff"``,
            ``"behind"`` or ``"wfbp"``.
        fusion: Which tensors share a buffer: ``"adaptive"`` (measured times), ``"aligned"`` (a fixed number),
            ``"naive"``, ``"wfbp"`` (each alone), ``"single"``, ``"behind"`` (aligned, with ``scope="group"``), or a
            ``FusionPolicy``.
        scope: ``"tensor"`` selects from every tensor, ahead of fusion; ``"group"`` from the fused buffer, behind it.
        quota: ``"proportional"`` gives every tensor the density; ``"pooled"`` a quarter of it, and the rest of a
            buffer's room to its largest elements.
        dense: Shell patterns of parameter names that always travel dense, for example ``["*.bias"]``.
        dense_below: Tensors of fewer elements than this travel dense.
        memory: Error feedback: ``"residual"``, ``"dgc"`` (momentum correction; use plain SGD with it), ``"none"``, or
            a ``Memory``.
        collective: ``"auto"`` (dense where that is predicted to be cheaper), ``"allgather"`` (always sparse) or
            ``"allreduce"``.
        wire: ``"auto"`` (lossless), ``"bf16"``, ``"fp16"``, ``"fp32"``, or a codec such as ``"block16-bf16"``.
        transport: Library that carries the bytes: ``"torch"`` (torch.distributed: gloo, NCCL) or ``"horovod"``, in
            processes that horovodrun or mpirun has started.
        kwargs: Every argument of :class:`~lightning.pytorch.strategies.DDPStrategy` and of ``DistributedDataParallel``.

    Raises:
        ValueError: If a name or number is not one of the possible ones.
        MisconfigurationException: If an option of DDP contradicts this strategy.

    Example::

        strategy = SAFusionStrategy(compressor="gaussiank", density=0.05)
        Trainer(accelerator="gpu", devices=8, num_nodes=4, strategy=strategy)
    """

    def __init__(
        self,
        compressor: str | Sparsifier | None = None,
        density: float | DensitySchedule = 0.05,
        system: str = "safusion",
        fusion: str | FusionPolicy | None = None,
        scope: Scope | None = None,
        quota: QuotaRule | None = None,
        dense: list[str] | None = None,
        dense_below: int | None = None,
        memory: str | Memory | None = None,
        collective: CollectiveChoice | None = None,
        wire: str | None = None,
        transport: Literal["torch", "horovod"] = "torch",
        **kwargs: Any,
    ) -> None:
        refuse_options(kwargs, list(inspect.signature(SAFusionStrategy).parameters))
        if transport not in ("torch", "horovod"):
            raise ValueError(f"transport must be 'torch' or 'horovod', got {transport!r}")
        self._over_horovod = transport == "horovod"
        if self._over_horovod:
            configure_horovod(kwargs)
        row = resolve_system(system)
        if fusion == "behind":
            scope = scope or "group"
            dense_below = 0 if dense_below is None else dense_below
        self.system = row.name
        self.settings = EngineSettings(
            compressor=resolve_sparsifier(row.compressor if compressor is None else compressor),
            density=resolve_density(density),
            fusion=row.policy() if fusion is None else resolve_fusion(fusion),
            memory=resolve_memory(row.memory if memory is None else memory),
            scope=scope or row.scope,
            quota=quota or row.quota,
            collective=collective or row.collective,
            wire=wire or row.wire,
        )
        if isinstance(dense, str):
            raise TypeError(f"dense is a list of patterns, got the text {dense!r}: write [{dense!r}]")
        self._dense = list(dense or [])
        self._dense_below = row.dense_below if dense_below is None else dense_below
        if self._dense_below < 0:
            raise ValueError(f"dense_below is a number of elements, 0 or more, got {self._dense_below}")
        super().__init__(**kwargs)
        self._transport: Transport | None = None
        self._hook: DDPHook | None = None
        self._aside: str | None = None
        self._wrapped: list[str] = []  # trainable parameters that DDP knows
        self._dense_for_good: str | None = None  # why plain DDP goes on where the engine has begun
        self._costs_followed = 0  # windows when costs were last looked at
        self._sends_all: str | None = None  # why the engine does that, instead of stepping aside
        self._signals: DeferredSignals | None = None
        self._last_report: dict[str, Any] | None = None  # of a fit that has ended

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the names that ``Trainer(strategy=...)`` takes, as DDPStrategy does for ``ddp``."""
        launchers: dict[str, str] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        unused: dict[str, dict[str, bool]] = {
            "": {},
            "_find_unused_parameters_false": {"find_unused_parameters": False},
            "_find_unused_parameters_true": {"find_unused_parameters": True},
        }
        for launcher, start_method in launchers.items():
            for suffix, options in unused.items():
                name = f"safusion{launcher}{suffix}"
                if name not in strategy_registry:
                    description = f"SAFusionStrategy with start_method {start_method!r}"
                    strategy_registry.register(name, cls, description, start_method=start_method, **options)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wraps the model so that every parameter has a bucket, and hence a call of the hook, of its own."""
        if torch._dynamo.config.optimize_ddp == "python_reducer":
            raise MisconfigurationException(
                "torch._dynamo.config.optimize_ddp='python_reducer' bypasses DDP's buckets, which this strategy "
                "works on; set it to True (the default) or False."
            )
        self._last_report = self._ended = None
        self._wrapped = [name for name, _ in trainable(model)]
        specs = self._specs(model)
        self._transport = self._make_transport(model)
        entry = self._resumed[1] if self._resumed is not None else {}
        checked = {"system": self.system, "checkpoint": str(entry.get("nonce"))}
        check_equal(self._transport, fingerprint(self.settings, specs) | checked)
        reason = self._dense_for_good or self.settings.dense_reason(specs, self._transport.world_size)
        # DDP's own group is for control where Horovod carries the gradients: those it carries even when all are sent
        by_engine = self._over_horovod and self._transport.world_size > 1
        needed = bool(by_engine or entry.get("holds_back") or self._sends_all) and self._dense_for_good is None
        self._aside, self._sends_all = (None, reason) if needed else (reason, None)
        if not specs:
            self._aside = "no parameter has a dense gradient"
        options = dict(self._ddp_kwargs)
        if self._aside is None:
            options["gradient_as_bucket_view"] = True
            if options.get("bucket_cap_mb") is None:
                options["bucket_cap_mb"] = 0
        # On the current stream, whatever the Lightning version: gradient hooks run on the stream of this construction
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
        self._controller = build_controller(
            settings, self._specs(module), self._transport, self.root_device, measure, _announce, overlap, deferred
        )
        params = [param for _, param in dense_parameters(module)]
        self._hook = DDPHook(self._controller, params, sparse_parameters(module), static_graph)
        self.model.register_comm_hook(None, self._hook.run)

    def _never_waits(self) -> bool:
        """Whether nothing asks the host to wait for an exchange: every tensor has a gradient on all ranks each step."""
        streams = self.root_device.type == "cuda" and self._transport is not None and self._transport.stream_ordered
        return streams and self.lightning_module is not None and self.lightning_module.automatic_optimization

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._bind()

    def _bind(self) -> None:
        """Ties the engine to what exists only after the model was wrapped: optimizers and the loss scaler."""
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

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._controller is not None and self.lightning_module is not None:
            self._controller.epoch = self.lightning_module.current_epoch

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._hook is not None and isinstance(self.model, DistributedDataParallel):
            self._hook.check_complete(synchronised=self.model.require_backward_grad_sync)

    def _follow_trainable(self) -> None:
        """Wraps the model anew when parameters were frozen or unfrozen since: DDP knows those of its construction only.

        Raises:
            RuntimeError: If the ranks have different trainable parameters.
        """
        if not isinstance(self.model, DistributedDataParallel) or self._transport is None:
            return
        module = self.model.module
        names = [name for name, _ in trainable(module)]
        everyone = self._transport.gather_objects(names) if self._transport.world_size > 1 else [names]
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                different = sorted(set(theirs) ^ set(everyone[0]))
                raise RuntimeError(
                    f"ranks 0 and {rank} have different trainable parameters: {', '.join(different[:20])}. Freeze and "
                    "unfreeze the same ones on all ranks."
                )
        if names != self._wrapped:
            self._wrap_again(module)

    def _wrap_again(self, module: nn.Module) -> None:
        state = handover(self._controller) if self._controller is not None else None
        if self._hook is not None:
            self._hook.close()
        if self._transport is not None:
            self._transport.close()
        self._hook = self._controller = None
        self.model = module
        gc.collect()  # the old reducer leaves its hooks on the parameters until it is destroyed
        self.model = self._setup_model(module)
        self._register_ddp_hooks()
        if state is not None:
            self._take_over(state)
        self._bind()

    def _take_over(self, state: dict[str, Any]) -> None:
        if self._controller is not None:
            take_over(self._controller, state)
        elif self._signals is not None:
            self._signals.remove()  # there are no messages of ours left that could carry the news

    def _follow_costs(self) -> None:
        """Goes on with plain DDP where every buffer has travelled dense for good: the hook would only cost time."""
        controller = self._controller
        if controller is None or self._over_horovod or not isinstance(self.model, DistributedDataParallel):
            return
        # once after each window: never among the micro-batches of an accumulation, whose gradients are in DDP's buckets
        if controller.windows == self._costs_followed:
            return
        self._costs_followed = controller.windows
        if not controller.can_step_aside():
            return
        self._dense_for_good = "its all-reduce has been predicted to be faster for every buffer, review after review"
        self._wrap_again(self.model.module)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._controller is not None:
            self._signals = DeferredSignals(self._tell, requeue_signal(self.cluster_environment))
            self._signals.install()

    def _settle(self) -> None:
        if self._controller is not None:
            self._controller.settle()

    def _tell(self, notice: int) -> None:
        if self._controller is not None:
            self._controller.notices |= notice

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._follow_costs()
        if batch_idx == 0:
            self._follow_trainable()
        if self._signals is not None and self._controller is not None and self._controller.heard:
            heard, self._controller.heard = self._controller.heard, 0
            self._signals.deliver(heard)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._settle()
        if self._signals is not None:
            self._signals.remove()  # no gradients are exchanged that could carry the news

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._signals is not None and self._controller is not None:
            self._signals.install()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._settle()
        if self._signals is not None:
            self._signals.remove()
            self._signals = None

    def report(self) -> dict[str, Any]:
        """Figures of the latest step on this rank, under the keys of :meth:`WindowReport.as_dict`.

        Also ``system``, ``windows`` (exchanged so far), ``replans`` and ``plain_ddp``: why plain DDP is used, None if
        it is not. Before the first step, and with plain DDP, the figures are 0 and the lists empty. Where training runs
        in other processes (spawn, fork), ask there: in a callback.
        """
        if self._last_report is not None:
            return self._last_report
        figures: dict[str, Any] = {"system": self.system, "plain_ddp": self._aside, "windows": 0, "replans": 0}
        controller = self._controller
        if controller is None:
            return figures | nothing_exchanged()
        figures |= {"windows": controller.windows, "replans": controller.planner.replans}
        return figures | (controller.report.as_dict() if controller.report is not None else nothing_exchanged())

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._signals is not None:
            self._signals.remove(deliver=False)
            self._signals = None
        if self._controller is not None:
            self._controller.reset()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._hook is not None:
            self._last_report = self.report()
            self._hook.close()
            self._ended = self._controller
            if self._ended is not None:
                self._ended.release()
        if self._transport is not None:
            self._transport.close()
        self._hook = self._controller = self._transport = self._resumed = None
        self._sends_all = self._dense_for_good = None
        super().teardown()

    def _specs(self, module: nn.Module) -> tuple[TensorSpec, ...]:
        return specs_from_parameters(dense_parameters(module), self._dense, self._dense_below)


def _announce(text: str) -> None:
    rank_zero_info(f"SAFusionStrategy: {text}.")
