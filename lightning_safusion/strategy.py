"""The Lightning strategy: lifecycle only, no tensor arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_safusion.comm.transport import during
from lightning_safusion.environments.horovod import configure_horovod
from lightning_safusion.fusion.engine import CollectiveOption
from lightning_safusion.fusion.policy import FusionPolicy
from lightning_safusion.fusion.quota import QuotaRule, Scope
from lightning_safusion.parameters import check_dense_rules, refuse_options, refuse_parts
from lightning_safusion.settings import engine_settings
from lightning_safusion.settling import reason_to_settle, runs_compiled
from lightning_safusion.signals import DeferredSignals, requeue_signal
from lightning_safusion.sparsify.base import Sparsifier
from lightning_safusion.sparsify.memory import Memory
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.systems import DEFAULT, resolve_system
from lightning_safusion.wrapping import EngineDDPStrategy


class SAFusionStrategy(EngineDDPStrategy):
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
        system: A scheme by name (``safusion systems`` explains them). ``"saf-pooled"``: SAFusion with a quarter of
            its share for every tensor, the rest of a buffer's room for its largest elements, and four bits per value;
            its quota rule and wire format give way to arguments that they do not go with. The published SAFusion and
            its predecessor: ``"safusion"``, ``"safusion-paper"``, ``"saf-inter"``, ``"saf-naive"``, ``"fgbuff"``.
            Other sparse ones: ``"behind"``, ``"wfbp"``, ``"omgs"``, ``"cupcake"``, ``"horovod"``, ``"hipress"``,
            ``"espresso"``, ``"syncea"``, ``"oktopk"``, ``"gtopk"``, ``"adtopk"``, ``"ssfusion-naive"``,
            ``"ssfusion-o"``, ``"ssfusion-i"``, ``"ssfusion"``. Dense ones: ``"wfbp-dense"``, ``"mgwfbp"``,
            ``"horovod-dense"``. DDP with another hook: ``"dear"``, ``"easgd"``, ``"ddp"``, ``"ddp-bf16"``,
            ``"ddp-fp16"``, ``"powersgd"``, ``"powersgd-rank4"``.
        fusion: Which tensors share a buffer: ``"adaptive"`` (measured times), ``"aligned"`` (a fixed number),
            ``"naive"`` (a fixed capacity, filled at each worker's own pace), ``"wfbp"`` (each alone), ``"single"`` (all
            in one), ``"selective"`` (a fixed number of buffers, whose small tensors travel whole), ``"mgwfbp"`` and
            ``"omgs"`` (merged where that saves more than it delays), ``"cupcake"`` (cuts searched by trying them out),
            ``"horovod"`` (what is ready on all workers at a tick of the clock), ``"hipress"`` and ``"espresso"`` (each
            alone, whole or compressed), ``"behind"`` (aligned, with ``scope="group"``), or a ``FusionPolicy``.
        scope: ``"tensor"`` selects from every tensor, ahead of fusion; ``"group"`` from the fused buffer, behind it.
        quota: ``"proportional"`` gives every tensor the density; ``"pooled"`` a quarter of it, and the rest of a
            buffer's room to its largest elements.
        dense: Shell patterns of parameter names that always travel dense, for example ``["*.bias"]``.
        dense_below: Tensors of fewer elements than this travel dense.
        dense_below_ndim: Tensors of fewer dimensions than this travel dense; 2: vectors and scalars.
        memory: Error feedback: ``"residual"``, ``"decoupled"`` (what is held back is the momentum as well, in place of
            that of Adam, AdamW or SGD), ``"auto"`` (the latter where that loses less: below Adam and AdamW up to a
            density of 0.25, below SGD up to 0.02), ``"dgc"`` (momentum correction; plain SGD with it), ``"ef21"`` (the
            optimizer gets a dense estimate of the gradient; use Adam with betas=(0.0, ...)), ``"none"``, or a
            ``Memory``.
        collective: ``"auto"`` (dense where that is predicted to be cheaper), ``"allgather"`` (always sparse),
            ``"hybrid"`` (the same, with an all-reduce beside it for what travels whole), ``"hierarchical"`` (dense
            inside every node, the largest sums of each to the others), ``"allreduce"``,
            ``"oktopk"`` (sparse all-reduce) or ``"gtopk"`` (tree).
        wire: ``"auto"`` (lossless), ``"bf16"``, ``"fp16"``, ``"fp32"``, a few bits per value (``"q4"``, ``"q2"``,
            ``"sign"``), or a codec such as ``"block16-bf16"``.
        offload: Select from tensors on a thread of the host, as they become ready, where that holds nothing up.
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
        density: float | DensitySchedule = 0.1,
        system: str = DEFAULT,
        fusion: str | FusionPolicy | None = None,
        scope: Scope | None = None,
        quota: QuotaRule | None = None,
        dense: list[str] | None = None,
        dense_below: int | None = None,
        dense_below_ndim: int | None = None,
        memory: str | Memory | None = None,
        collective: CollectiveOption | None = None,
        wire: str | None = None,
        offload: bool | None = None,
        transport: Literal["torch", "horovod"] = "torch",
        **kwargs: Any,
    ) -> None:
        refuse_options(kwargs, list(inspect.signature(SAFusionStrategy).parameters))
        if transport not in ("torch", "horovod"):
            raise ValueError(f"transport must be 'torch' or 'horovod', got {transport!r}")
        row = resolve_system(system)
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
        }
        given = {name: part for name, part in parts.items() if part is not None}
        if row.ddp_hook is not None:
            refuse_parts(row.name, given, transport)
        if transport == "horovod":
            configure_horovod(kwargs)
        if fusion == "behind":
            given = {"scope": "group", "dense_below": 0} | given
        self.system = row.name
        self.settings = engine_settings(row, density, given)
        dense, below = given.get("dense", []), given.get("dense_below", row.dense_below)
        below_ndim = given.get("dense_below_ndim", row.dense_below_ndim)
        check_dense_rules(dense, below, below_ndim)
        over_horovod = transport == "horovod"
        super().__init__(list(dense), below, below_ndim, over_horovod, row.ddp_hook, row.elastic, **kwargs)
        self._compiled: bool | None = None  # a part of the model has been compiled; None: nobody has looked
        self._settles_because: str | None = None  # why no step reaches into the next forward pass

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
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self.settle()  # the backward pass writes where means of the last one are to be written
        if self._controller is not None and self.lightning_module is not None:
            self._controller.epoch = self.lightning_module.current_epoch

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._hook is not None and (ddp := self._ddp) is not None:
            self._hook.check_complete(synchronised=ddp.require_backward_grad_sync)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        if self._dear is not None and self._may_delay(optimizer):
            step = super().optimizer_step
            return self._dear.step(optimizer, closure, lambda delaying: step(optimizer, delaying, model, **kwargs))
        if self._elastic is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # with automatic optimization the closure is the forward and backward pass, which hide the exchange
        self._elastic.begin(optimizer)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._elastic.finish()
        return result

    def _may_delay(self, optimizer: Optimizer) -> bool:
        """Whether the step of an optimizer may reach into the next forward pass; says once why not."""
        module = self.lightning_module
        if module is None:
            return False
        if self._compiled is None:
            self._compiled = self.model is not self._ddp or runs_compiled(module)
        reason = reason_to_settle(module.trainer, module, optimizer, self._compiled)
        if reason is not None and reason != self._settles_because:
            rank_zero_info(f"SAFusionStrategy: gradients are averaged when a backward pass ends, because {reason}.")
        self._settles_because = reason
        return reason is None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._controller is not None:
            self._controller.let_go()
        output = super().training_step(*args, **kwargs)
        self.settle()  # what this forward pass has not used: gradients are emptied next
        return output

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.settle()
        for switch in self._switches:
            switch.settle()
        return super().optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for switch in self._switches:
            switch.restore()  # of a step that an error has ended
        with during("set-up, when workers restore a checkpoint"):
            super().load_optimizer_state_dict(checkpoint)

    @property
    def _place(self) -> str:
        """Where training is, for messages."""
        module = self.lightning_module
        return f"step {module.global_step}, epoch {module.current_epoch}" if module is not None else "set-up"

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        with during(f"the save of {filepath} in {self._place}"):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def barrier(self, name: str | None = None) -> None:
        with during(f"the barrier{f' {name!r}' if name else ''} of Lightning in {self._place}"):
            super().barrier(name)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        with during(f"a broadcast of Lightning in {self._place}"):
            return super().broadcast(obj, src)

    def _swap_centre(self) -> None:
        """Puts the centre in the place of this worker's weights, or back."""
        if self._elastic is not None and self.lightning_module is not None:
            self._elastic.swap(self.lightning_module.parameters())

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._elastic is not None and self.lightning_module is not None:
            state |= self._elastic.centres(self.lightning_module.named_parameters())
        return state

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._hold_signals()

    def _hold_signals(self) -> None:
        if self._controller is not None and self._signals is None:
            self._signals = DeferredSignals(self._tell, requeue_signal(self.cluster_environment))
            self._signals.install()

    def settle(self) -> None:
        """Has the last step done, where a part of it waits for the next forward pass (``system="dear"``).

        For code that keeps parameters in a list of its own: whoever takes them from the model has them up to date.
        """
        if self._dear is not None:
            self._dear.settle()

    def _settle(self) -> None:
        self.settle()
        if self._controller is not None:
            self._controller.settle()

    def _tell(self, notice: int) -> None:
        if self._controller is not None:
            self._controller.notices |= notice

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._hold_signals()  # again where a learning-rate finder has trained, and ended, inside of this training
        self._deliver_signals()
        self._follow_costs()
        if batch_idx == 0:
            self._follow_trainable()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._settle()
        self._release_signals()  # no gradients are exchanged that could carry the news
        self._swap_centre()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._swap_centre()
        if self._signals is not None and self._controller is not None:
            self._signals.install()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._settle()
        self._release_signals()
        self._signals = None
        self._swap_centre()
        self._elastic = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._signals is not None:
            self._signals.remove(deliver=False)
            self._signals = None
        if self._controller is not None:
            self._controller.reset()
        if self._dear is not None:
            self._dear.abandon()
        self._leave_momentum()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._hook is not None:
            self._last_report = self.report()
            self._hook.close()
            self._ended = self._controller
            if self._ended is not None:
                self._remember(self._ended)
                self._ended.release()
        if self._dear is not None:
            self._dear.close()
        if self._transport is not None:
            self._transport.close()
        self._hook = self._controller = self._transport = self._resumed = None
        self._sends_all = self._dense_for_good = self._plain_clock = self._elastic = None
        self._dear = self._settles_because = self._compiled = None
        self._leave_momentum()
        self._told_of_momentum = ""
        self._wrapped = []
        super().teardown()
