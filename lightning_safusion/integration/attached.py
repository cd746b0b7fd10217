"""What is attached below a wrapped model: it follows a training loop by hooks of the model and of its optimizers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_safusion.announce import announce, rank_zero_warn
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from lightning_safusion.fusion.build import JobTraits, check_equal, fingerprint
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import Observer
from lightning_safusion.fusion.state import carried, common_state, restore_carried, restore_common
from lightning_safusion.integration.attached_state import AttachedState
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.exchange import Choice, GradientExchange, Mode, choose
from lightning_safusion.integration.history import FitHistory
from lightning_safusion.integration.optimizer import suited
from lightning_safusion.integration.parameters import describe_untrained, optimizer_options, params_of, untrained
from lightning_safusion.integration.wrapped import Wrapped
from lightning_safusion.systems.settings import JobParts


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer that another one, as of Accelerate or Fabric, is around of."""
    inner = getattr(optimizer, "optimizer", None)
    return _plain(inner) if isinstance(inner, Optimizer) else optimizer


def _listed(optimizers: Any) -> list[Optimizer]:
    """The optimizers, which may be a single one, without what is around of them."""
    single = isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable)
    listed = [_plain(each) for each in ([optimizers] if single else optimizers)]
    for each in listed:
        if not hasattr(each, "register_step_pre_hook"):
            raise TypeError(
                f"optimizers must be a torch.optim.Optimizer or a list of them, got {each!r:.80} of type "
                f"{type(each).__name__}"
            )
    return listed


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook of an optimizer, which the engine holds, and DDP's reducer the engine: it must not hold DDP."""
    reference = WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


class _BeforeForward:
    """Says that a forward pass begins; that of a copy of the model, to which nothing is attached, says nothing."""

    def __init__(self, attached: Attached | None = None) -> None:
        self._attached = attached

    @torch.compiler.disable
    def __call__(self, model: nn.Module, _: Any) -> None:
        if self._attached is not None:
            self._attached._begin(model)

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class Attached(AttachedState):
    """The engine below one wrapped model; made by :func:`attach`.

    Attributes:
        history: What was exchanged so far.
        cautions: What is known to cost accuracy, in sentences.
    """

    def __init__(
        self,
        model: Wrapped,
        job: JobParts,
        scaler: torch.amp.GradScaler | None,
        timeout: timedelta | None,
        observers: list[Observer] | None = None,
    ) -> None:
        self.epoch = 0  #: for densities that change by the epoch
        super().__init__(model, job.settings)
        self._dense_rules = job.dense_rules
        self._decided = None if job.system.ddp_hook is None else f"system={job.system.name!r} asks for it"
        self._scaler, self._timeout = scaler, timeout
        self._transport: Transport | None = None
        self._exchange, self._choice = GradientExchange(), Choice(Mode.PLAIN, "no optimizer has stepped yet")
        self._observers = [] if observers is None else observers
        self.history = FitHistory()
        self.cautions: tuple[str, ...] = ()
        self._learned: Mapping[str, Any] | None = None
        self._found: list[Optimizer] = []  # that have stepped before they were known
        self._seen: WeakSet[Optimizer] = WeakSet()  # that are bound, or have stepped
        self._handles: list[RemovableHandle] = [
            # before FSDP2 puts whole parameters in the place of shards
            model.module.register_forward_pre_hook(_BeforeForward(self), prepend=True),
            register_optimizer_step_pre_hook(_weakly(self._find)),
        ]
        self._watches: list[RemovableHandle] = []

    # Who exchanges

    def bind(self, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        """Begins with these optimizers, or goes on with others, or with other parameters. Collective.

        Residuals, by name of the parameter, and counters stay. To be called between two steps.

        Args:
            optimizers: All that step the parameters of the model.

        Raises:
            MisconfigurationException: If one does not go with the settings.
            RuntimeError: On all workers, if they have different settings, with both values; if :meth:`close` was
                called.
            TypeError: If one is no optimizer.
        """
        if not self._handles:
            raise RuntimeError("close() was called, and has given the model back: call attach again")
        plain = _listed(optimizers)
        state = None if self.engine is None else carried(self.engine)
        self._leave()
        self.settings = suited(self.settings, plain)
        with during("set-up, when workers make a process group for their gradients"):
            self._transport = TorchTransport(self._model.group, self._timeout)
        try:
            self._choose(plain, self._transport)
            self._exchange.bind(plain, self._scaler)
        except BaseException:
            self._leave()
            raise
        if self.engine is not None and state is not None:
            restore_carried(self.engine, state)
        if self.engine is not None and self._learned is not None:
            restore_common(self.engine, self._learned)
            self._learned = None
        self.cautions = self._exchange.cautions(plain)
        for line in self.cautions:
            rank_zero_warn(f"SAFusion: {line}.")
        if not any(map(self._steps, plain)):
            rank_zero_warn(
                "SAFusion: none of the optimizers has a parameter of the model. If nothing else trains it, make the "
                "optimizers after fully_shard, or what else replaces parameters."
            )
        for optimizer in plain:
            self._watches.append(optimizer.register_step_pre_hook(_weakly(self._check)))
            self._watches.append(optimizer.register_state_dict_pre_hook(_weakly(self._settle)))
            self._watches.append(optimizer.register_load_state_dict_pre_hook(_weakly(self._settle)))
            inner = getattr(optimizer, "optim", None)  # as of ZeroRedundancyOptimizer
            self._seen.update(each for each in (optimizer, inner) if isinstance(each, Optimizer))
        self._bound_to(plain)

    def _choose(self, optimizers: Sequence[Optimizer], transport: Transport) -> None:
        model, settings = self._model, self.settings
        specs = model.specs(optimizers, self._dense_rules)
        left = untrained(model.inner, optimizers)
        hosts = check_equal(transport, model.options | optimizer_options(optimizers) | fingerprint(settings, specs))
        self._choice = choose(settings, specs, optimizers, transport.world_size, False, self._holds_back, self._decided)
        if None in model.gather(self._choice.plain_ddp) and self._choice.plain_ddp is not None:
            self._choice = Choice(Mode.ENGINE)  # as other shards, which are not as large: they are saved together
        if self._choice.plain_ddp is not None:
            announce(f"{model.dense} is used, because {self._choice.plain_ddp}")
            return
        if left:
            announce(describe_untrained(left, automatic=False))
        node = os.environ.get("GROUP_RANK", socket.gethostname())
        self._exchange = exchange = EngineExchange(
            settings,
            specs,
            self._choice,
            transport,
            next(model.inner.parameters()).device,
            JobTraits(node=node, plain_ddp_allowed=model.place[1] == 1, hosts=hosts),  # else each shard would decide
            {"find_unused_parameters": model.find_unused, "static_graph": model.static},
            automatic=len(optimizers) == 1,
            observers=self._observers,
            untrained=left,
            averages=True,
        )
        model.install(exchange, optimizers)

    def _leave(self, reason: str | None = None) -> None:
        """DDP averages the gradients, for a reason that follows a "because"."""
        for handle in self._watches:
            handle.remove()
        self._watches.clear()
        self._model.leave()
        self._drop(reason)

    def _drop(self, reason: str | None) -> None:
        self._exchange.close()
        if self.engine is not None:
            self.history.keep(self.engine)
            self.settings.memory.bind([0], self.engine.space.device)
        self._exchange, self._choice = GradientExchange(), Choice(Mode.PLAIN, reason)
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # Where the loop is

    def _steps(self, optimizer: Optimizer) -> bool:
        own = {id(param) for param in self._model.parameters()}
        return any(id(param) in own for param in params_of(optimizer))

    def _find(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if not self._steps(optimizer):
            return
        if self._optimizers is None:
            self._found.append(optimizer)
        elif self.engine is not None:
            rank_zero_warn(
                f"SAFusion: {type(optimizer).__name__} steps parameters of the model, and was not given to attach: "
                "call bind of what it has returned with all optimizers, on all workers. Until then momentum may count "
                "twice, and gradients that are missing are not noticed."
            )

    def _begin(self, model: nn.Module) -> None:
        if not torch.is_grad_enabled():
            return
        self._model.refuse_part()
        # what is collective begins in training mode: one worker alone may evaluate
        if self._found and model.training:
            found, self._found = self._found, []
            self.bind(found)
        if (engine := self.engine) is None:
            return
        if model.training and (reason := self.history.why_aside(engine)) is not None:
            announce(f"{self._model.dense} is used, because {reason}")
            self._decided = reason
            self._leave(reason)
            return
        self._model.refuse_join()
        self._exchange.begin_batch()
        self._exchange.begin_backward(self.epoch)
        self.history.begin_batch(engine)

    def _check(self, *_: Any) -> None:
        self._exchange.end_backward(synchronised=self._model.synchronises)

    def _settle(self, *_: Any) -> None:
        self._exchange.settle_optimizers()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside exchange nothing; the next one outside exchanges the sum.

        With FSDP2 shards are summed inside of nodes meanwhile, as after ``set_requires_all_reduce(False)``.
        """
        return self._model.no_sync()

    # What can be read and kept

    @property
    def module(self) -> nn.Module:
        """The model, inside of DDP."""
        return self._model.inner

    @property
    def engine(self) -> Engine | None:
        """The engine on this worker; None where plain DDP exchanges."""
        return self._exchange.engine

    @property
    def plain_ddp(self) -> str | None:
        """Why nothing is exchanged sparse; None if something is."""
        return self._choice.plain_ddp

    def learned(self) -> dict[str, Any]:
        """What was found out about the job, for :meth:`begin_with` of another one; the same on all replicas."""
        return {"plain_ddp": self._decided, "engine": None if self.engine is None else common_state(self.engine)}

    def begin_with(self, learned: Mapping[str, Any]) -> None:
        """Begins with the plan and the costs of another loop, without its residuals; before :meth:`bind`."""
        self._decided = learned["plain_ddp"]
        self._learned = learned["engine"]

    def figures(self) -> dict[str, Any]:
        """Figures of the latest step on this worker; see :meth:`SAFusionStrategy.figures`."""
        return {"plain_ddp": self.plain_ddp} | self.history.figures(self.engine)

    report = figures

    def abandon(self) -> None:
        """In the place of what is collective in :meth:`close`, where an error ends training: waits for nobody."""
        self._exchange.abandon()
        if self._transport is not None:
            self._transport.abandon()
            self._transport = None

    def end(self) -> None:
        """Training has ended: gives the model back. Residuals can be saved until :meth:`close`."""
        if not self._handles:
            return  # somebody else may have the model
        for handle in [*self._handles, *self._watches]:
            handle.remove()
        self._handles.clear()
        self._model.leave()
        self._exchange.close()
        self._model.release()

    def close(self) -> None:
        """Gives the gradients back to DDP, and their momentum to the optimizers; residuals are lost. Collective."""
        self.end()
        self._drop("it was closed")
