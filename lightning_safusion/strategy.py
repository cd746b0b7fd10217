"""The Lightning strategy: lifecycle only, no tensor arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import deprecated, override

from lightning_safusion.announce import announce
from lightning_safusion.comm.transport.horovod import HorovodTransport
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.transport.torch_backend import TorchTransport, default_transport
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Observer
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.settings import Integrity
from lightning_safusion.fusion.state import common_state, restore_common
from lightning_safusion.integration.attach import PARTS
from lightning_safusion.integration.checkpoint.checkpoints import Checkpoints
from lightning_safusion.integration.fit import Fit
from lightning_safusion.integration.history import FitHistory
from lightning_safusion.integration.horovod import check_horovod, configure_horovod
from lightning_safusion.integration.inputs import UnevenInputs, Weighting, check_inputs, uncounted
from lightning_safusion.integration.meeting import MeetingStrategy, all_present
from lightning_safusion.integration.options import refuse_accelerator, refuse_options, register_launchers
from lightning_safusion.integration.parameters import trained
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.lookup import QuotaRule, Scope, SelectBy, check_name
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory.contract import Memory
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.systems.rows import DEFAULT
from lightning_safusion.systems.settings import job_parts


class SAFusionStrategy(EngineReadings, MeetingStrategy, DDPStrategy):
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
            optimizers, 0.25 with Lion and others with a momentum, 0.72 with Muon. With ``memory="auto"``,
            and where elements are compared by update, the first steps send more
            (:class:`~lightning_safusion.sparsify.schedule.Opening`), unless it is a ``DensitySchedule``.
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
        uneven_inputs: Workers with different numbers of batches: ``"error"``, an OutOfStepError on all of them;
            ``"stop"``, an epoch ends where the first has none left; ``"join"``, it goes on until the last has none
            left, while the others repeat a batch that counts nothing (:attr:`idle`).
        weighting: Mean of the gradients: ``"workers"``, of those that have a batch, each alike; ``"samples"``, each by
            the number of its samples (found in the batch, or ``"batch_size"`` in the output of ``training_step``);
            ``"world"``, with ``"join"``: the sum divided by the number of workers, also of those without a batch.
        integrity: ``"checksum"``: every message begins with a CRC-32C (4 bytes), which receivers verify before they
            read it. Damage ends the step with a ``DamagedMessageError`` on all workers; nothing of the step is applied,
            and the residuals keep its gradients. Gradients in host memory only. Dense all-reduces, which are sums of
            the library, carry none. None: no message does.
        transport: Library that carries the bytes: ``"torch"`` (torch.distributed: gloo, NCCL) or ``"horovod"``, in
            processes that horovodrun or mpirun has started.
        log_figures: Log ``safusion/exposed_ms`` (also in the progress bar), ``safusion/sent_mb``, ``safusion/dense_mb``
            and ``safusion/density`` of rank 0's latest exchange every ``log_every_n_steps``, as the training step logs.
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
        uneven_inputs: UnevenInputs = "error",
        weighting: Weighting = "workers",
        integrity: Integrity | None = None,
        transport: Literal["torch", "horovod"] = "torch",
        log_figures: bool = True,
        **kwargs: Any,
    ) -> None:
        given = locals()
        refuse_accelerator(compressor)
        refuse_options(kwargs, list(inspect.signature(SAFusionStrategy).parameters))
        check_name("transport", transport, ("torch", "horovod"))
        job = job_parts(system, density, {name: given[name] for name in PARTS}, transport)
        check_inputs(uneven_inputs, weighting, system)
        if transport == "horovod":
            configure_horovod(kwargs)
        super().__init__(**kwargs)
        self.system, self.settings, self.dense_rules = job.system.name, job.settings, job.dense_rules
        self.log_figures = log_figures
        self._hook = job.system.ddp_hook  # DDP with this hook, in place of the engine
        self.uneven_inputs: UnevenInputs = uneven_inputs
        self.weighting: Weighting = weighting
        self._over_horovod = transport == "horovod"
        self._observers: list[Observer] = []  # of every engine of this strategy
        self._history = FitHistory()
        self._checkpoints = Checkpoints(self)
        self._fit = Fit(self)
        self._learned: Mapping[str, Any] = {}  # by another fit of the same job, for the next one
        self.cautions = ()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the names that ``Trainer(strategy=...)`` takes, as DDPStrategy does for ``ddp``."""
        register_launchers(strategy_registry, cls, (None, False, True))

    # Setting up

    @override
    def setup_distributed(self) -> None:
        with self._making_groups():
            super().setup_distributed()

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._history = FitHistory()
            self._fit.begin(trainer)
        super().setup(trainer)
        self._fit.bind()
        self.cautions = self._fit.exchange.cautions(self.optimizers)
        for caution in self.cautions:
            announce(caution)
        if self.engine is not None and (learned := self._learned.get("engine")) is not None:
            restore_common(self.engine, learned)
        self._learned = {}

    @override
    def configure_ddp(self) -> None:
        """Optimizers come first, since what none of them has is not exchanged; they see the weights that all share."""
        self._fit.share_weights()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._fit.ddp is None and trainer.state.fn == TrainerFn.FITTING:
            super().configure_ddp()

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._fit.wrap(model)

    def _make_transport(self, model: nn.Module) -> Transport:
        # here, not in the fit: a subclass may bring its own
        if self._over_horovod:
            transport = HorovodTransport()
            check_horovod(model, transport.world_size, self.world_size)
            return transport
        group = self._ddp_kwargs.get("process_group")
        if group is None:
            return default_transport(self._timeout, self._fit.lockstep)
        return TorchTransport(group, self._timeout, self._fit.lockstep)

    @override
    def _register_ddp_hooks(self) -> None:
        """Registers the hook on every device; DDPStrategy does so on CUDA only, and would train dense elsewhere."""
        self._fit.register()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader: Any = super().process_dataloader(dataloader)
        module = self.lightning_module
        if module is None or not module.trainer.training:
            return loader
        self._fit.begin(module.trainer)  # maybe asked for before the set-up
        return self._fit.inputs.take(loader, module)

    # A batch

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._fit.begin_training()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._fit.follow(batch_idx)
        self._fit.inputs.begin(batch)
        self._history.begin_batch(self.engine)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._fit.exchange.begin_batch()
        inputs, module = self._fit.inputs, self.lightning_module
        counting = uncounted(module) if inputs.idle and module is not None else nullcontext()
        with self._fit.exchanging("the training step"), counting:
            output = super().training_step(*args, **kwargs)
        inputs.end_step(output)
        if module is not None and not inputs.idle:
            self._log(module)
        self.settle()  # parameters that this forward pass has not used: gradients are emptied next
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self._fit.exchanging("the backward pass"):
            return super().backward(self._fit.inputs.weigh(closure_loss), optimizer, *args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self.settle()  # the backward pass writes where means of the last one are to be written
        self._fit.exchange.begin_backward(self._fit.epoch)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._fit.ddp is not None:
            self._fit.exchange.end_backward(synchronised=self._fit.ddp.require_backward_grad_sync)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        step = super().optimizer_step
        compiled = self.model is not self._fit.ddp
        with self._fit.exchanging("the step of an optimizer"):
            return self._fit.exchange.step(
                optimizer, closure, lambda each: step(optimizer, each, model, **kwargs), compiled
            )

    def settle(self) -> None:
        """Finishes the last step, where a part of it is left for the next forward pass (``system="dear"``).

        Needed only if you hold references to parameters of your own; reading a parameter through the model settles it.
        """
        with self._fit.exchanging("the rest of a step"):
            self._fit.exchange.settle()

    # Validation and the end

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.settle()
        self._fit.pause()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._fit.resume()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.settle()
        self._fit.finish()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fit.abandon(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._fit.transport is not None:  # a fit has ended
            self._history.ended = self.figures()
        self._fit.close()
        self._fit = Fit(self)
        vars(self).pop("clock", None)  # the next fit may be on another device
        self._checkpoints.resumed = None
        super().teardown()  # waits for asynchronous writing
        self._checkpoints.finished()

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        # a union would lose the versions of modules, an attribute of the state
        state.update(self._fit.exchange.weights())
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.settle()
        self._fit.exchange.settle_optimizers()
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Writes one part per rank as well, unless the checkpoint holds weights only; all ranks call it.

        While an error ends training, rank 0 writes what plain DDP would where other ranks do not come.
        """
        engine = self.engine
        if engine is not None and self._fit.interrupted and not all_present(engine.windows if engine.between else None):
            engine, self._fit.deserted = None, True
            rank_zero_warn(f"{filepath} is saved without residuals: an error has kept other workers from the save.")
        elif engine is None and dist.is_initialized():
            engine = self._history.last
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options=storage_options)
        with during(f"the save of {filepath} in {self._place}"):
            self._checkpoints.save(engine, checkpoint, filepath, write)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoints.loaded(checkpoint, checkpoint_path)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the engine as well, which did not exist yet when the checkpoint was loaded."""
        self._fit.exchange.settle_optimizers()  # of a step that an error has ended
        super().load_optimizer_state_dict(checkpoint)
        with during("set-up, when workers restore a checkpoint"):
            self._checkpoints.restore()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        self._checkpoints.removed(filepath)

    # Lightning's own collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._fit.deserted:
            super().barrier(name)

    @override
    def _meet(self, what: str) -> None:
        if self._fit.lockstep is not None:
            self._fit.lockstep.meet(what)

    # Another fit of the same job

    @override
    def learned(self) -> dict[str, Any]:
        engine = self.engine
        return {"plain_ddp": self._fit.decided, "engine": None if engine is None else common_state(engine)}

    @override
    def begin_with(self, learned: Mapping[str, Any]) -> None:
        self._learned = learned

    # What can be read

    def gradient_specs(self, module: nn.Module) -> tuple[TensorSpec, ...]:
        """The dense gradients of a module as this strategy exchanges them, in registration order."""
        return specs_from_parameters(trained(module, self.optimizers), *self.dense_rules)

    @property
    def engine(self) -> Engine | None:
        """The engine of this fit on this rank; None with plain DDP.

        Wrapping the model anew makes another one: do not keep it.
        """
        return self._fit.engine

    @property
    @deprecated("SAFusionStrategy.controller is SAFusionStrategy.engine now.")
    def controller(self) -> Engine | None:
        """The same."""
        return self.engine

    @property
    def idle(self) -> bool:
        """Whether this worker repeats a batch that counts nothing, since it has none left (``uneven_inputs="join"``).

        Known in a training step. What the step logs and torchmetrics' metrics of the module count nothing either.
        """
        module = self.lightning_module
        return self._fit.inputs.idle and module is not None and module.trainer.training

    @property
    def _plain_ddp(self) -> str | None:
        return self._fit.choice.plain_ddp

    @deprecated("SAFusionStrategy.report() is SAFusionStrategy.figures() now.")
    def report(self) -> dict[str, Any]:
        """The same."""
        return self.figures()
