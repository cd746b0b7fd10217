"""DeAR: the exchange of gradients reaches into the next forward pass (Zhang et al., ICDCS 2023, section III)."""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_safusion.baselines.watch import ParameterWatch, runs_compiled
from lightning_safusion.comm.collectives.allreduce import TwoPhaseSum, coo_means
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.integration.exchange import GradientExchange
from lightning_safusion.integration.parameters import trainable

# Hooks between the backward pass and the end of the step that have the optimizer, or averaged gradients.
_READ_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


@dataclass(eq=False)
class _Bucket:
    params: Sequence[Tensor]  # of which it holds the gradients
    memory: Tensor  # the bucket itself; the gradients are views of it
    total: TwoPhaseSum

    def deliver(self) -> None:
        self.total.wait()
        self.memory.copy_(self.total.buffer)


class _DelayedStep:
    """A step of an optimizer that is made bucket by bucket, with the options that it had when the step was due.

    ``pending`` has the bucket of every parameter, by its id, whose gradient is not there yet.
    """

    def __init__(self, optimizer: Optimizer, pending: dict[int, _Bucket]) -> None:
        self._optimizer = optimizer
        self._dtype = torch.get_default_dtype()  # optimizers make states in it; Lightning may change it in forward
        self._grads: dict[int, Tensor | None] = {}  # by id of the parameter
        self._groups: dict[_Bucket | None, list[dict[str, Any]]] = {}  # None: of parameters that wait for nothing
        for group in optimizer.param_groups:
            members: dict[_Bucket | None, list[Tensor]] = {}
            for param in group["params"]:
                members.setdefault(pending.get(id(param)), []).append(param)
                self._grads[id(param)] = param.grad
            # schedulers change options before the step is made: a learning rate may be a tensor, changed in place
            options = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in group.items()}
            for bucket, params in members.items():
                self._groups.setdefault(bucket, []).append(options | {"params": params})

    def groups(self, bucket: _Bucket | None) -> list[dict[str, Any]]:
        return self._groups.get(bucket, [])

    def make(self, bucket: _Bucket) -> None:
        optimizer, groups = self._optimizer, self.groups(bucket)
        params = [param for group in groups for param in group["params"]]
        found = [param.grad for param in params]  # None where they have been emptied meanwhile
        everything, dtype = optimizer.param_groups, torch.get_default_dtype()
        try:
            torch.set_default_dtype(self._dtype)
            for param in params:
                param.grad = self._grads[id(param)]
            optimizer.param_groups = groups
            optimizer.step()
        finally:
            torch.set_default_dtype(dtype)
            optimizer.param_groups = everything
            for param, grad in zip(params, found, strict=True):
                param.grad = grad


class Dear(GradientExchange):
    """Reduce-scatters during the backward pass, all-gathers during the next forward pass.

    A communication hook starts the reduce-scatter of every bucket. At the end of the backward pass all ranks start the
    all-gathers, those of the first layers first: in an order that no rank's forward pass can change. Inside
    :meth:`step` nothing waits for them. The next use of a parameter waits for its bucket, writes the mean into the
    gradients of the bucket, and makes the optimizer's step for them. Outside of :meth:`step`, gradients are averaged
    when the backward pass ends, as in DDP.

    Differs from the released code in this: buckets are DDP's (25 MiB, in the order in which gradients become ready) and
    not modules in forward order; all-gathers queue up at once and are not launched one ahead of the layer that runs;
    any optimizer that treats parameters one by one; the last step is not lost.
    """

    def __init__(self, transport: Transport) -> None:
        self._module: LightningModule | None = None
        self._count = 0  # parameters that DDP manages
        self._transport = transport
        self._ends_in_hook = False
        self._runs_compiled: bool | None = None  # not known yet
        self._because: str | None = None  # why no step reaches into the next forward pass
        self._delays = False
        self._watch: ParameterWatch | None = None
        self._totals: dict[tuple[int, ...], TwoPhaseSum] = {}  # of the last window, by the parameters of the bucket
        self._window: dict[tuple[int, ...], _Bucket] = {}  # of the backward pass that runs
        self._sparse: list[tuple[Tensor, Future[Tensor]]] = []
        self._seen: set[int] = set()
        self._pending: dict[int, _Bucket] = {}  # whose mean has not been delivered, by id of each parameter
        self._step: _DelayedStep | None = None

    def ddp_options(self, options: dict[str, Any]) -> dict[str, Any]:
        # There DDP calls all hooks and finalizes in one go at first: a callback queued by the last one comes too late.
        self._ends_in_hook = bool(options.get("static_graph"))
        return options | {"gradient_as_bucket_view": True}

    def register(self, ddp: DistributedDataParallel) -> None:
        self._module, self._count = ddp.module, len(trainable(ddp.module))
        ddp.register_comm_hook(None, self.run)

    @torch.compiler.disable
    def run(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook; its future is complete at once, holding the bucket itself."""
        params, buffer = bucket.parameters(), bucket.buffer()
        key = tuple(map(id, params))
        if not self._seen.isdisjoint(key):
            self._forget_window()  # the last backward pass never finished
        self._seen.update(key)
        future: Future[Tensor] = Future()
        if buffer.is_sparse:
            self._sparse.append((buffer, future))  # its mean is another tensor
        else:
            total = self._totals.get(key)
            if total is None or total.buffer.shape != buffer.shape:
                total = TwoPhaseSum(buffer.numel(), buffer.dtype, self._transport, buffer.device)
            # dividing before the sum, as DDP does
            torch.div(buffer, self._transport.world_size, out=total.buffer)
            total.start()
            self._window[key] = _Bucket(params, buffer, total)
            future.set_result(buffer)
        if len(self._seen) == self._count:
            if self._ends_in_hook:
                self._end()
            else:
                # never wait in the hook: another rank may need this thread's next collective first (SyncBatchNorm)
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return future

    @torch.compiler.disable
    @torch.no_grad()
    def _end(self) -> None:
        """Ends a backward pass, before DDP finalizes it: all launches are in one order on all ranks."""
        self._ends_in_hook = False
        window, self._window = self._window, {}
        sparse, self._sparse = self._sparse, []
        self._seen.clear()
        for bucket in reversed(window.values()):
            bucket.total.start_second()
        means = coo_means(self._transport, [grad for grad, _ in sparse])
        for (_, future), mean in zip(sparse, means, strict=True):
            future.set_result(mean)
        self._totals = {key: bucket.total for key, bucket in window.items()}
        for bucket in window.values():
            if self._delays:
                self._pending.update(dict.fromkeys(map(id, bucket.params), bucket))
            else:
                bucket.deliver()

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any], compiled: bool
    ) -> Any:
        """Steps now for parameters whose gradients are there, and later for the others."""
        module = self._module
        if module is None or not self._may_delay(optimizer, module, compiled):
            return step(closure)
        if self._watch is None:
            self._watch = ParameterWatch(module, self._settle_parameter)

        def delaying() -> Any:
            result = closure()
            if self._pending:
                self._step = _DelayedStep(optimizer, self._pending)
                optimizer.param_groups = self._step.groups(None)
            return result

        everything, last = optimizer.param_groups, self._step
        self._delays = True
        try:
            return step(delaying)
        except BaseException:
            if self._step is not last:
                self._step = None  # it was not made
            raise
        finally:
            self._delays = False
            optimizer.param_groups = everything

    def _may_delay(self, optimizer: Optimizer, module: LightningModule, compiled: bool) -> bool:
        if self._runs_compiled is None:
            self._runs_compiled = compiled or runs_compiled(module)
        if self._runs_compiled:
            reason: str | None = "the model is compiled, and its uses of parameters cannot be seen"
        else:
            reason = _optimizer_needs_all(optimizer) or _trainer_needs_all(module)
        if reason is not None and reason != self._because:
            rank_zero_info(f"SAFusion: gradients are averaged when a backward pass ends, because {reason}.")
        self._because = reason
        return reason is None

    def _settle_parameter(self, param: Tensor) -> None:
        if id(param) in self._pending:
            self._settle(self._pending[id(param)])

    def settle(self) -> None:
        while self._pending:
            self._settle(next(iter(self._pending.values())))

    def _settle(self, bucket: _Bucket) -> None:
        for param in bucket.params:
            del self._pending[id(param)]
        device = bucket.total.buffer.device.type
        # A forward pass may be under autocast, a validation in inference mode: no tensor of these may stay in an
        # optimizer.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            bucket.deliver()
            if self._step is not None:
                self._step.make(bucket)
        if not self._pending:
            self._step = None

    def abandon(self) -> None:
        """Finishes the last complete step if that is possible, and forgets what has not ended."""
        self._forget_window()
        try:
            self.settle()
        except RuntimeError as error:  # a peer has died
            self._pending, self._step = {}, None
            warnings.warn(f"the last step could not be applied to all parameters: {error}", stacklevel=2)

    def _forget_window(self) -> None:
        self._window, self._sparse = {}, []
        self._seen.clear()
        self._totals.clear()  # an exchange that has not ended may still write into them

    def close(self) -> None:
        """Finishes the last step, and removes every hook."""
        self.abandon()
        if self._watch is not None:
            self._watch.close()
        self._watch = self._module = None


def _optimizer_needs_all(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot step for a part of its parameters; to follow a "because", None if it can."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim."):
        return f"{name} is not known to treat every parameter by itself, as all optimizers of torch but LBFGS do"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has step hooks, which would run once for every bucket"
    return None


def _trainer_needs_all(module: LightningModule) -> str | None:
    """Why gradients must be averages, and weights new, when a step ends; to follow a "because", None if they need not.

    It may differ between ranks: what is launched, and in which order, does not depend on it.
    """
    trainer = module.trainer
    if not module.automatic_optimization:
        return "optimization is manual, and steps and backward passes may come in any order"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "a loss scaler looks at all gradients before it steps"
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", module):
        return "gradients are clipped, which needs all of them"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's callback connector
    for hook in _READ_GRADIENTS:
        if is_overridden(hook, module):
            return f"{type(module).__name__}.{hook} may look at gradients"
        for callback in callbacks:
            ours = type(callback).__module__.startswith("lightning_safusion.")
            if not ours and is_overridden(hook, callback, parent=Callback):
                return f"{type(callback).__name__}.{hook} may look at gradients"
    return None
