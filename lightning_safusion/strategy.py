"""The Lightning strategy: lifecycle only, no tensor arithmetic."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_safusion.baselines import hook_exchange
from lightning_safusion.comm.transport.horovod import HorovodTransport
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.transport.lockstep import Lockstep
from lightning_safusion.comm.transport.torch_backend import (
    TorchTransport,
    default_transport,
    end_groups_at_exit,
    hurry_at_exit,
)
from lightning_safusion.fusion.build import check_equal, fingerprint
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Clock, Observer, clock_for
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.plans.costs import GroupCosts
from lightning_safusion.fusion.plans.plan import Plan
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.quota import QuotaRule, Scope
from lightning_safusion.fusion.record import WindowRecord
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.fusion.state import carried, common_state, restore_carried, restore_common
from lightning_safusion.integration.agreement import ddp_options, replaced_parameters, training_options
from lightning_safusion.integration.attendance import all_attend
from lightning_safusion.integration.binding import Bound, describe_untrained, needs_plain_ddp, trained, untrained
from lightning_safusion.integration.checkpoint import Checkpoints
from lightning_safusion.integration.engine_exchange import EngineExchange, History, announce
from lightning_safusion.integration.epoch_end import EpochEnd, more_batches
from lightning_safusion.integration.exchange import Choice, GradientExchange, Mode, choose
from lightning_safusion.integration.horovod import check_horovod, configure_horovod
from lightning_safusion.integration.optimizer import suited
from lightning_safusion.integration.outlook import Outlook
from lightning_safusion.integration.parameters import refuse_options, refuse_python_reducer, trainable
from lightning_safusion.integration.signals import DeferredSignals
from lightning_safusion.lookup import check_name
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.sparsify.selection.units import SelectBy
from lightning_safusion.systems.rows import DEFAULT
from lightning_safusion.systems.settings import job_parts


class SAFusionStrategy(DDPStrategy):
    """Distributed data parallel training that sends sparsified gradients.

    Every gradient tensor is sparsified *before* it is fused into a communication buffer, so that no tensor is missing
    from a buffer. All workers close a buffer after the same tensors, so that none waits for another. Buffer sizes
    follow measured times, so that the exchange runs during backpropagation (SAFusion, HPDC 2025). Elements that are not
    sent stay in a residual and are sent later.

    Arguments left at None take the part of the chosen ``system``.

    Args:
        compressor: Chooses the elements to send: ``"topk"``, ``"randomk"``, ``"threshold"``, ``"dgc"``,
            ``"gaussiank"``, ``"redsync"``, ``"sidco"``, ``"adtopk"``, ``"oktopk"``, ``"none"``, the name of an
            installed one, or a ``Sparsifier``.
        density: Share of the elements to send, in (0, 1], or a ``DensitySchedule``. None, with ``memory="auto"``: 0.02
            with Adam, AdamW, NAdam, RMSprop, Adagrad and Adafactor, 0.05 with RAdam, 0.1 with SGD and schedule-free
            optimizers, 0.25 with Lion and others with a momentum, 0.65 with Muon. With ``memory="auto"`` the
            first steps send more (:class:`~lightning_safusion.sparsify.schedule.Opening`), unless it is a
            ``DensitySchedule``.
        system: A scheme by name; ``safusion systems`` lists and explains them all. ``"saf-pooled"``, the default, is
            SAFusion with four bits per value, ``quota="auto"``, ``memory="auto"`` and ``select_by="auto"``. Its quota
            rule and wire format change where another argument needs it.
        fusion: Which tensors share a buffer: ``"adaptive"`` (measured times), ``"aligned"`` (a fixed number),
            ``"naive"`` (a fixed capacity, filled at each worker's own pace), ``"wfbp"`` (each alone), ``"single"`` (all
            in one), ``"selective"`` (a fixed number of buffers; small tensors are dense), ``"mgwfbp"`` and ``"omgs"``
            (merged where that saves more than it delays), ``"cupcake"`` (cuts searched by trying them out),
            ``"horovod"`` (what is ready on all workers at a tick of the clock), ``"hipress"`` and ``"espresso"`` (each
            alone, dense or compressed), ``"behind"`` (aligned, with ``scope="group"``), or a ``FusionPolicy``.
        scope: ``"tensor"`` selects from every tensor, before fusion; ``"group"`` from the fused buffer, after it.
        quota: ``"proportional"`` gives every tensor the density; ``"shared"`` a quarter of it, and the rest to tensors
            with the largest elements of the model, which all ranks agree on from time to time; ``"pooled"`` a quarter
            of it, and the rest of a buffer's room to its largest elements; ``"auto"``: proportional where elements are
            compared in units of the update, else shared.
        dense: Shell patterns of parameter names that are always dense, for example ``["*.bias"]``.
        dense_below: Tensors of fewer elements than this are dense.
        dense_below_ndim: Tensors of fewer dimensions than this are dense; 2: vectors and scalars.
        memory: Error feedback: ``"residual"``, ``"decoupled"`` (the residual is the momentum as well, in place of that
            of Adam, AdamW, RAdam or SGD), ``"auto"`` (the latter where that loses less: with Adam and its kind up to a
            density of 0.25, with SGD up to 0.02), ``"dgc"`` (momentum correction; plain SGD with it), ``"ef21"`` (the
            optimizer gets a dense estimate of the gradient; use Adam with betas=(0.0, ...)), ``"none"``, or a
            ``Memory``.
        collective: ``"auto"`` (dense where that is predicted to be cheaper), ``"allgather"`` (always sparse),
            ``"hybrid"`` (the same, with an all-reduce beside it for dense tensors), ``"hierarchical"`` (dense inside
            every node, the largest sums of each to the others), ``"sharded"`` (sparse to owners and back, whose volume
            does not grow with the workers), ``"hierarchical-sharded"`` (dense inside every node, sums of nodes to
            owners and back), ``"allreduce"``, ``"oktopk"`` (sparse all-reduce) or ``"gtopk"`` (tree).
        wire: ``"auto"`` (lossless), ``"bf16"``, ``"fp16"``, ``"fp32"``, a few bits per value (``"q4"``, ``"q2"``,
            ``"sign"``), or a codec such as ``"eliasfano-bf16"``.
        offload: Select from tensors on a thread of the host, as they become ready, where that delays nothing.
        select_by: Units in which elements are compared: ``"gradient"``; ``"update"``, how far the optimizer would move
            them (gradients divided as by Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad or Adafactor; as they are with
            others); ``"auto"``, the latter with these and schedule-free ones, where the residual has a momentum.
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
        density: float | DensitySchedule | None = None,
        system: str = DEFAULT,
        fusion: str | FusionPolicy | None = None,
        scope: Scope | None = None,
        quota: QuotaRule | None = None,
        dense: list[str] | None = None,
        dense_below: int | None = None,
        dense_below_ndim: int | None = None,
        memory: str | Memory | None = None,
        collective: str | None = None,
        wire: str | None = None,
        offload: bool | None = None,
        select_by: SelectBy | None = None,
        transport: Literal["torch", "horovod"] = "torch",
        **kwargs: Any,
    ) -> None:
        refuse_options(kwargs, list(inspect.signature(SAFusionStrategy).parameters))
        check_name("transport", transport, ("torch", "horovod"))
        parts: dict[str, Any] = {
            "compressor": compressor,
            "fusion": fusion,
            "scope": scope,
            "quota": quota,
            "dense": dense,
            "dense_below": dense_below,
            "dense_below_ndim": dense_below_ndim,
            "memory": memory,
            "collective": collective,
            "wire": wire,
            "offload": offload,
            "select_by": select_by,
        }
        job = job_parts(system, density, parts, transport)
        if transport == "horovod":
            configure_horovod(kwargs)
        super().__init__(**kwargs)
        self.system, self.settings, self.dense_rules = job.system.name, job.settings, job.dense_rules
        self._hook_name = job.system.ddp_hook  # DDP with this hook, in place of the engine
        self._over_horovod = transport == "horovod"
        self._observers: list[Observer] = []  # of every engine of this strategy
        self._history, self._outlook = History(), Outlook()
        self._checkpoints = Checkpoints()
        self._choice = Choice(Mode.PLAIN)  # who exchanges the gradients
        self._decided: str | None = None  # why plain DDP has taken the engine's place
        self._exchange = GradientExchange()
        self._transport: Transport | None = None
        self._lockstep: Lockstep | None = None  # of a fit of several workers
        self._epoch_end = EpochEnd()
        self._signals: DeferredSignals | None = None  # during training with an engine
        self._wrapped: list[tuple[str, nn.Parameter]] = []  # trainable parameters that DDP knows
        self._untrained: list[str] = []  # those that no optimizer has
        self._bound = Bound()  # the optimizers that the exchange is bound to
        self._begins = False  # no batch of this fit was trained on
        self._deserted = False  # an error has ended this fit, and some ranks did not come to save its state
        self._costs_followed = 0  # number of windows at the last look at the costs
        self._learned: Mapping[str, Any] = {}  # by another fit of the same job, for the next one
        self.cautions: tuple[str, ...] = ()  #: what is known to cost accuracy in this fit, in sentences

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the names that ``Trainer(strategy=...)`` takes, as DDPStrategy does for ``ddp``."""
        for launcher, start in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
            for unused in (None, False, True):
                suffix = "" if unused is None else f"_find_unused_parameters_{unused}".lower()
                options: dict[str, Any] = {} if unused is None else {"find_unused_parameters": unused}
                name = f"safusion{launcher}{suffix}"
                if name not in strategy_registry:
                    description = f"SAFusionStrategy with start_method {start!r}"
                    strategy_registry.register(name, cls, description, start_method=start, **options)

    # Setting up

    @override
    def setup_distributed(self) -> None:
        given = dist.is_available() and dist.is_initialized()
        super().setup_distributed()
        if not given:  # it is ours to end
            end_groups_at_exit()

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._history, self._outlook = History(), Outlook()
            self._decided = self._learned.get("plain_ddp")
        self._deserted = False
        if trainer.state.fn == TrainerFn.FITTING:
            group = self._ddp_kwargs.get("process_group")
            if group is None or dist.get_world_size(group) == self.world_size:
                self._lockstep = Lockstep.of_all(self.root_device, self._timeout, lambda: more_batches(trainer))
            if self._lockstep is not None:
                self._epoch_end.attach(trainer, self._lockstep)
        super().setup(trainer)
        self._bind()
        self.cautions = self._exchange.cautions(self.optimizers)
        for caution in self.cautions:
            announce(caution)
        learned, self._learned = self._learned, {}
        if self.controller is not None and learned.get("engine") is not None:
            restore_common(self.controller, learned["engine"])

    @override
    def configure_ddp(self) -> None:
        """Waits for the optimizers, which Lightning sets up next: what none of them has is not exchanged."""

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._ddp is None and trainer.state.fn == TrainerFn.FITTING:
            super().configure_ddp()

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Chooses who exchanges the gradients, and wraps the model as that needs it. Collective."""
        refuse_python_reducer()
        options = dict(self._ddp_kwargs)
        self._wrapped = trainable(model)
        self.settings = suited(self.settings, self.optimizers)
        specs = self.gradient_specs(model)
        self._transport = transport = self._make_transport(model)
        entry = self._checkpoints.entry
        checked = {"system": self.system, "checkpoint": str(entry.get("nonce"))} | ddp_options(options)
        checked |= {"sync_batchnorm": str(self._layer_sync is not None)}
        # before the tensors, of which thousands may differ as well
        check_equal(transport, checked | fingerprint(self.settings, specs))
        if self._hook_name is not None:
            self._choice = Choice(Mode.HOOK, f"system={self.system!r} asks for it")
            self._exchange = hook_exchange(self._hook_name, transport, options.get("process_group"))
        else:
            # where Horovod carries the gradients, DDP's own group is for control messages only
            by_horovod = self._over_horovod and transport.world_size > 1
            was_dense = self._choice.mode is Mode.DENSE_ENGINE  # before the model was wrapped again
            needed = bool(by_horovod or entry.get("holds_back") or was_dense)
            self._choice = choose(self.settings, specs, transport.world_size, needed, self._decided)
            if self._choice.mode is Mode.ENGINE and (reason := needs_plain_ddp(self.optimizers)) is not None:
                if self._over_horovod:
                    raise MisconfigurationException(f"{reason}: with transport='horovod' use density=1.0.")
                self._choice = Choice(Mode.PLAIN, reason)
            if self._choice.plain_ddp is None:
                self._exchange = self._make_engine(model, specs, transport)
        # On the current stream, whatever the Lightning version: gradient hooks run on the stream of this construction
        options = self._exchange.ddp_options(options)
        with during("set-up, when DDP compares and copies the parameters"):
            return DistributedDataParallel(module=model, device_ids=self.determine_ddp_device_ids(), **options)

    def _make_transport(self, model: nn.Module) -> Transport:
        if self._over_horovod:
            transport = HorovodTransport()
            check_horovod(model, transport.world_size, self.world_size)
            return transport
        group = self._ddp_kwargs.get("process_group")
        if group is None:
            return default_transport(self._timeout, self._lockstep)
        return TorchTransport(group, self._timeout, self._lockstep)

    def _make_engine(self, model: nn.Module, specs: Sequence[TensorSpec], transport: Transport) -> EngineExchange:
        automatic = self.lightning_module is not None and self.lightning_module.automatic_optimization
        left = untrained(model, self.optimizers)
        before, self._untrained = self._untrained, [name for name, _ in left]
        if left and self._untrained != before:
            announce(describe_untrained(left, automatic))
        return EngineExchange(
            self.settings,
            specs,
            self._choice,
            transport,
            self.root_device,
            self.node_rank,
            self._ddp_kwargs,
            automatic=automatic,
            replaceable=not self._over_horovod,
            observers=self._observers,
            untrained=left,
        )

    @override
    def _register_ddp_hooks(self) -> None:
        """Registers the hook on every device; DDPStrategy does so on CUDA only, and would train dense elsewhere."""
        if (reason := self._choice.plain_ddp) is not None:
            announce(f"{self._choice.mode.value} is used, because {reason}")
        if self._ddp is not None:
            self._exchange.register(self._ddp)

    def _bind(self) -> None:
        """Ties the exchange to the optimizers, after all workers have compared theirs. Collective in a fit."""
        self._bound = Bound(self.optimizers)
        module = self.lightning_module
        if self._transport is not None and module is not None:
            # workers that train weights of their own may have different optimizers
            optimizers = self.optimizers if self._exchange.replicates else []
            check_equal(self._transport, training_options(module.trainer, module, optimizers))
        scaler = getattr(self.precision_plugin, "scaler", None)
        # the factor as it is on the device: get_scale() would wait for it
        self._exchange.bind(self.optimizers, None if scaler is None else scaler._get_scale_async)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        """The wrapped model, also where it has been compiled since; None outside training."""
        model = getattr(self.model, "_orig_mod", self.model)
        return model if isinstance(model, DistributedDataParallel) else None

    # Wrapping again

    def _follow_trainable(self) -> None:
        """Wraps the model anew when parameters were frozen or unfrozen since: DDP knows those of its construction only.

        Raises:
            RuntimeError: If the ranks have different trainable parameters.
        """
        if self._ddp is None or self._transport is None:
            return
        replaced = replaced_parameters(self._ddp.module, self._wrapped, self._transport, self._epoch)
        if replaced is not None:
            self._wrap_again(replaced)

    def _follow_optimizers(self) -> None:
        """Binds the exchange to optimizers or groups that have come or gone since."""
        if self._ddp is None or self._bound.are(self.optimizers):
            return
        left = [name for name, _ in untrained(self._ddp.module, self.optimizers)]
        other = suited(self.settings, self.optimizers)
        if self.controller is not None and other is not self.settings:
            before, after = self.settings.memory.name, other.memory.name
            announce(f"memory={after!r} takes the place of {before!r} with these optimizers: what that held is lost")
        others = left != self._untrained or other is not self.settings
        if self.controller is not None and (others or needs_plain_ddp(self.optimizers)):
            self._wrap_again()
        else:
            self._bind()

    def _follow_costs(self) -> None:
        """Changes to plain DDP once every buffer is dense and stays so: the hook would only cost time."""
        engine = self.controller
        # once after each window: never among the micro-batches of an accumulation, whose gradients are in DDP's buckets
        if engine is None or self._over_horovod or engine.windows == self._costs_followed:
            return
        self._costs_followed = engine.windows
        with during(f"the change to plain DDP after step {engine.windows}"):
            if not engine.step_aside():
                return
        if self._signals is not None:
            self._signals.ask()
        del engine  # or its buffers would stay as long as the model is wrapped
        self._go_plain("its all-reduce has been predicted to be faster, review after review")

    def _go_plain(self, reason: str) -> None:
        """Changes to plain DDP; no residual remains."""
        self._decided = reason
        self._wrap_again(keep=False)
        self.settings.memory.bind([0], self.root_device)

    def _wrap_again(self, replaced: Sequence[str] = (), keep: bool = True) -> None:
        """Wraps the model anew.

        Args:
            replaced: Names of parameters that are other objects now: the residual is not theirs.
            keep: The next engine gets the state of this one.
        """
        if self._ddp is None:
            return
        engine, state = self.controller, None
        if engine is not None:
            engine.settle()
            self._history.keep(engine)
            state = carried(engine, replaced) if keep else None
        self._exchange.close()
        if self._transport is not None:
            self._transport.close()
        del engine
        self._exchange = GradientExchange()
        compiles = getattr(self.model, "dynamo_ctx", None)  # what torch.compile was asked to do, if it was
        self.model = module = self._ddp.module
        gc.collect()  # the old reducer leaves its hooks on the parameters until it is destroyed
        self.model = self._setup_model(module)
        self._register_ddp_hooks()
        if self.controller is not None and state is not None:
            restore_carried(self.controller, state)
        elif self.controller is None and self._signals is not None:
            self._signals.remove()  # there are no messages that could carry notices
        self._bind()
        if compiles is not None:
            self.model = compiles(self.model)

    # A batch

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._begins = True
        self._defer_signals()

    def _defer_signals(self) -> None:
        if self.controller is not None and self._signals is None:
            self._signals = DeferredSignals(lambda: self.controller, self.cluster_environment)
            self._signals.install()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._lockstep is not None:
            self._lockstep.begin_batch(self._epoch, batch_idx)
        self._defer_signals()  # again after a search for the learning rate, which is a training inside of this one
        if self._signals is not None:
            self._signals.deliver()
        self._follow_optimizers()
        self._follow_costs()
        if (line := self._outlook.begin_batch(self.controller)) is not None:
            announce(line)
        if batch_idx == 0 or self._begins:  # one that is resumed may begin in the middle of an epoch
            self._follow_trainable()
        self._begins = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._exchange.begin_batch()
        with self._exchanging("the training step"):
            output = super().training_step(*args, **kwargs)
        self.settle()  # parameters that this forward pass has not used: gradients are emptied next
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self._exchanging("the backward pass"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self.settle()  # the backward pass writes where means of the last one are to be written
        self._exchange.begin_backward(self._epoch)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._ddp is not None:
            self._exchange.end_backward(synchronised=self._ddp.require_backward_grad_sync)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        step = super().optimizer_step
        compiled = self.model is not self._ddp
        with self._exchanging("the step of an optimizer"):
            return self._exchange.step(
                optimizer, closure, lambda each: step(optimizer, each, model, **kwargs), compiled
            )

    def settle(self) -> None:
        """Finishes the last step, where a part of it is left for the next forward pass (``system="dear"``).

        Needed only if you hold references to parameters of your own; reading a parameter through the model settles it.
        """
        with self._exchanging("the rest of a step"):
            self._exchange.settle()

    # Validation and the end

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.settle()
        self._meet("the beginning of validation")
        if self._signals is not None:
            self._signals.release()
        self._exchange.pause()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._exchange.resume()
        if self._signals is not None:
            self._signals.install()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.settle()
        self._meet("the end of training")
        if self._signals is not None:
            self._signals.release()
            self._signals = None
        self._exchange.finish()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._signals is not None:
            self._signals.remove(deliver=False)
            self._signals = None
        self._exchange.abandon()
        if self._transport is not None:
            self._transport.abandon()
        if self._lockstep is not None:
            self._lockstep.rest()  # its group ends with the default one, or with the process
            self._lockstep = None
        hurry_at_exit()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._transport is not None:  # a fit has ended
            self._history.ended = self.report()
        engine = self.controller
        self._exchange.close()
        if engine is not None:
            self._history.keep(engine)
            self._history.last = engine
            engine.release()
            if not self._interrupted:  # else the device may still wait for a worker that is lost
                engine.space.memory.to_host()
        if self._transport is not None:
            self._transport.close()
        if self._lockstep is not None:
            self._lockstep.close()
            self._lockstep = None
        self._epoch_end.detach()
        self._exchange, self._transport, self._choice = GradientExchange(), None, Choice(Mode.PLAIN)
        self._checkpoints.resumed = self._decided = None
        self._wrapped, self._untrained, self._bound = [], [], Bound()
        self.__dict__.pop("clock", None)  # the next fit may be on another device
        super().teardown()  # waits for asynchronous writing
        self._checkpoints.finished(self.global_rank)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        state.update(self._exchange.weights())  # a union would lose the versions of modules, an attribute of the state
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.settle()
        self._exchange.settle_optimizers()
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Writes one part per rank as well, unless the checkpoint holds weights only; all ranks call it.

        While an error ends training, rank 0 writes what plain DDP would where other ranks do not come.
        """
        engine = self.controller
        if engine is not None and self._interrupted and not all_attend(engine.windows if engine.between else None):
            engine, self._deserted = None, True
            rank_zero_warn(f"{filepath} is saved without residuals: an error has kept other workers from the save.")
        elif engine is None and torch.distributed.is_initialized():
            engine = self._history.last
        save = super().save_checkpoint
        ranks = self.global_rank, self.local_rank
        with during(f"the save of {filepath} in {self._place}"):
            self._checkpoints.save(
                engine,
                self.settings.describe(),
                checkpoint,
                filepath,
                self.checkpoint_io,
                ranks,
                lambda: save(checkpoint, filepath, storage_options=storage_options),
            )

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        # Lightning before 2.6 does not know weights_only
        options = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = super().load_checkpoint(checkpoint_path, **options)
        self._checkpoints.loaded(checkpoint, checkpoint_path)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the engine as well, which did not exist yet when the checkpoint was loaded."""
        self._exchange.settle_optimizers()  # of a step that an error has ended
        super().load_optimizer_state_dict(checkpoint)
        with during("set-up, when workers restore a checkpoint"):
            self._checkpoints.restore(self.controller, self.settings.describe())

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        self._checkpoints.removed(self.checkpoint_io, filepath, self.local_rank)

    # Lightning's own collectives

    @property
    def _interrupted(self) -> bool:
        """Whether an error is ending training."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _epoch(self) -> int:
        return self.lightning_module.current_epoch if self.lightning_module is not None else 0

    @property
    def _place(self) -> str:
        """Where training is, for messages."""
        module = self.lightning_module
        return f"step {module.global_step}, epoch {module.current_epoch}" if module is not None else "set-up"

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._deserted:
            return
        with during(f"the barrier{f' {name!r}' if name else ''} of Lightning in {self._place}"):
            if self._lockstep is not None:
                self._lockstep.meet(f"barrier {name}")
            super().barrier(name)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        with during(f"a broadcast of Lightning in {self._place}"):
            if self._lockstep is not None:
                self._lockstep.meet("broadcast")
            return super().broadcast(obj, src)

    def _meet(self, what: str) -> None:
        """Waits for all workers of a fit where validation, or what follows the last batch, begins. Collective."""
        if self._lockstep is not None:
            with during(f"{what} in {self._place}"):
                self._lockstep.meet(what)

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        """Names where a worker was lost, or the place where another one waits, in what may exchange gradients."""
        explained = nullcontext() if self._lockstep is None else self._lockstep.explained()
        with during(f"{what} in {self._place}"), explained:
            yield

    # Another fit of the same job

    def learned(self) -> dict[str, Any]:
        """What this fit has found out about the job, the same on all ranks: for :meth:`begin_with`, during training."""
        engine = self.controller
        return {"plain_ddp": self._decided, "engine": None if engine is None else common_state(engine)}

    def begin_with(self, learned: Mapping[str, Any]) -> None:
        """Lets the next fit begin with the plan and the costs of another one, without its residuals.

        Args:
            learned: What :meth:`learned` has returned in a fit of the same model, settings and workers.
        """
        self._learned = learned

    # What can be read

    def gradient_specs(self, module: nn.Module) -> tuple[TensorSpec, ...]:
        """The dense gradients of a module as this strategy exchanges them, in registration order."""
        return specs_from_parameters(trained(module, self.optimizers), *self.dense_rules)

    def add_observer(self, observer: Observer) -> None:
        """Calls an observer after every window of this rank, in all fits from now on."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Ends :meth:`add_observer`; does nothing for other objects."""
        if observer in self._observers:
            self._observers.remove(observer)

    @property
    def controller(self) -> Engine | None:
        """The engine of this fit on this rank; None with plain DDP.

        Wrapping the model anew makes another one: do not keep it.
        """
        return self._exchange.engine

    @property
    def record(self) -> WindowRecord | None:
        """What the latest window of this rank did; None with plain DDP and before the first."""
        return None if self.controller is None else self.controller.record

    @cached_property
    def clock(self) -> Clock:
        """A clock of this rank's device; its seconds are those of observed events."""
        return clock_for(self.root_device)

    @property
    def plan(self) -> Plan | None:
        """Which tensors share a buffer; None with plain DDP, and while the order of the gradients is not known."""
        return self.controller.planner.current if self.controller is not None else None

    @property
    def costs(self) -> GroupCosts | None:
        """What plans are made from, the same on all ranks; None with plain DDP."""
        engine = self.controller
        return engine.planner.costs(engine.space.shape) if engine is not None else None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The planner's latest decisions on buffer sizes, oldest first, the same on all ranks."""
        engine = self.controller
        return self._history.decisions + (() if engine is None else tuple(engine.planner.decisions))

    def report(self) -> dict[str, Any]:
        """Figures of the latest step on this rank, under the keys of :meth:`WindowRecord.as_dict`.

        Also ``system``, ``windows`` (exchanged so far), ``replans``, ``plain_ddp``: why plain DDP is used, None if it
        is not; ``step_s`` and ``ddp_step_s``: seconds of a step (median of the latest), and under DDP by prediction,
        both None before the first review of the plan; ``last_engine_step``: number of the latest step that this package
        exchanged, None if there is none. Before the first step, and with plain DDP, the figures of a step are None and
        the lists empty. Where training runs in other processes (spawn, fork), ask there: in a callback.
        """
        if self._history.ended is not None:
            return self._history.ended
        of_job: dict[str, Any] = {"system": self.system, "plain_ddp": self._choice.plain_ddp}
        of_job |= {"step_s": self._outlook.step_s, "ddp_step_s": self._outlook.ddp_step_s}
        return of_job | self._history.report(self.controller)
