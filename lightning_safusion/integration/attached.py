"""What is attached below a wrapped model: it follows a training loop by hooks of the model and of its optimizers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import nn
from torch.distributed.checkpoint import StorageReader
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_safusion.announce import announce, rank_zero_warn
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from lightning_safusion.fusion.build import check_equal, fingerprint
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.fusion.state import carried, local_state, restore_carried
from lightning_safusion.integration.checkpoint import parts, restore, save
from lightning_safusion.integration.checkpoint.distributed import (
    OTHER_SHARDS,
    DistributedCheckpoint,
    distributed_state,
    gathered,
    scattered,
)
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.exchange import Choice, GradientExchange, Mode, choose
from lightning_safusion.integration.history import FitHistory
from lightning_safusion.integration.optimizer import suited
from lightning_safusion.integration.parameters import describe_untrained, optimizer_options, untrained
from lightning_safusion.integration.wrapped import Wrapped

_WHERE = "the state of lightning_safusion"


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer that another one, as of Accelerate or Fabric, is around of."""
    inner = getattr(optimizer, "optimizer", None)
    return _plain(inner) if isinstance(inner, Optimizer) else optimizer


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


class Attached:
    """The engine below one wrapped model; made by :func:`attach`.

    Args:
        model: Whose gradients are exchanged.
        settings: Of the engine.
        dense_rules: Which tensors are dense.
        scaler: Of the loss.
        timeout: Of communicators.
    """

    def __init__(
        self,
        model: Wrapped,
        settings: EngineSettings,
        dense_rules: tuple[list[str], int, int],
        scaler: torch.amp.GradScaler | None,
        timeout: timedelta | None,
    ) -> None:
        self.epoch = 0  #: for densities that change by the epoch
        self._model, self._settings, self._dense_rules = model, settings, dense_rules
        self._scaler, self._timeout = scaler, timeout
        self._transport: Transport | None = None
        self._exchange, self._choice = GradientExchange(), Choice(Mode.PLAIN, "no optimizer has stepped yet")
        self._history = FitHistory()
        self._costs_followed = 0  # number of windows at the last look at the costs
        self._resume: Callable[[], None] = partial(self.load_state_dict, {})  # of a state that came before optimizers
        self._bound = self._holds_back = False  # a state has residuals
        self._optimizers: Sequence[Optimizer] = ()
        self._found: list[Optimizer] = []  # that have stepped before they were known
        self._seen: WeakSet[Optimizer] = WeakSet()  # that are bound, or have stepped
        self._handles: list[RemovableHandle] = [
            # before FSDP2 puts whole parameters in the place of shards
            model.module.register_forward_pre_hook(_BeforeForward(self), prepend=True),
            register_optimizer_step_pre_hook(_weakly(self._find)),
        ]
        self._watches: list[RemovableHandle] = []

    # Who exchanges

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        """Begins with these optimizers, or goes on with others, or with other parameters. Collective.

        Residuals, by name of the parameter, and counters stay. To be called between two steps.

        Args:
            optimizers: All that step the parameters of the model.

        Raises:
            MisconfigurationException: If one does not go with the settings.
            RuntimeError: On all workers, if they have different settings, with both values; if :meth:`close` was
                called.
        """
        if not self._handles:
            raise RuntimeError("close() was called, and has given the model back: call attach again")
        plain = [_plain(each) for each in optimizers]
        state = None if self.engine is None else carried(self.engine)
        self._leave()
        self._settings = suited(self._settings, plain)
        with during("set-up, when workers make a process group for their gradients"):
            self._transport = TorchTransport(self._model.group, self._timeout)
        scaler = self._scaler
        try:
            self._choose(plain, self._transport)
            self._exchange.bind(plain, None if scaler is None else scaler._get_scale_async)
        except BaseException:
            self._leave()
            raise
        self._bound, self._optimizers = True, plain
        if self.engine is not None and state is not None:
            restore_carried(self.engine, state)
        resume, self._resume = self._resume, partial(self.load_state_dict, {})
        resume()
        for line in self._exchange.cautions(plain):
            rank_zero_warn(f"SAFusion: {line}.")
        for optimizer in plain:
            self._watches.append(optimizer.register_step_pre_hook(_weakly(self._check)))
            self._watches.append(optimizer.register_state_dict_pre_hook(_weakly(self._settle)))
            self._watches.append(optimizer.register_load_state_dict_pre_hook(_weakly(self._settle)))
            inner = getattr(optimizer, "optim", None)  # as of ZeroRedundancyOptimizer
            self._seen.update(each for each in (optimizer, inner) if isinstance(each, Optimizer))

    def _choose(self, optimizers: Sequence[Optimizer], transport: Transport) -> None:
        model, settings = self._model, self._settings
        specs = model.specs(optimizers, self._dense_rules)
        left = untrained(model.inner, optimizers)
        hosts = check_equal(transport, model.options | optimizer_options(optimizers) | fingerprint(settings, specs))
        self._choice = choose(settings, specs, optimizers, transport.world_size, False, self._holds_back, None)
        if self._choice.plain_ddp is not None:
            announce(f"{self._choice.mode.value} is used, because {self._choice.reason}")
            return
        if left:
            announce(describe_untrained(left, automatic=False))
        exchange = EngineExchange(
            settings,
            specs,
            self._choice,
            transport,
            next(model.inner.parameters()).device,
            os.environ.get("GROUP_RANK", socket.gethostname()),
            {"find_unused_parameters": model.find_unused, "static_graph": model.static},
            automatic=len(optimizers) == 1,
            replaceable=True,
            observers=[],
            untrained=left,
            hosts=hosts,
            averages=True,
        )
        self._exchange = exchange
        model.install(exchange, optimizers)

    def _leave(self, reason: str | None = None) -> None:
        """DDP averages the gradients, for a reason that follows a "because"."""
        for handle in self._watches:
            handle.remove()
        self._watches.clear()
        self._model.leave()
        self._exchange.close()
        if self.engine is not None:
            self._history.keep(self.engine)
            self._settings.memory.bind([0], self.engine.space.device)
        self._exchange, self._choice = GradientExchange(), Choice(Mode.PLAIN, reason)
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # Where the loop is

    def _find(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        own = {id(param) for param in self._model.parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(id(param) in own for param in params):
            return
        if not self._bound:
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
        # what is collective begins in training mode: one worker alone may evaluate
        if self._found and model.training:
            found, self._found = self._found, []
            self.bind(found)
        if (engine := self.engine) is None or (model.training and self._steps_aside(engine)):
            return
        self._model.refuse_join()
        self._exchange.begin_batch()
        self._exchange.begin_backward(self.epoch)
        if (line := self._history.begin_batch(engine)) is not None:
            announce(line)

    def _steps_aside(self, engine: Engine) -> bool:
        """Whether plain DDP takes the engine's place, since every buffer is dense and stays so."""
        # once after each window: never among the batches of an accumulation, whose gradients are in DDP's buckets
        if engine.windows == self._costs_followed:
            return False
        self._costs_followed = engine.windows
        if not engine.step_aside():
            return False
        reason = "its all-reduce has been predicted to be faster, review after review"
        announce(f"plain DDP is used, because {reason}")
        self._leave(reason)
        return True

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

    def figures(self) -> dict[str, Any]:
        """Figures of the latest step on this worker; see :meth:`SAFusionStrategy.figures`."""
        return {"plain_ddp": self._choice.plain_ddp} | self._history.figures(self.engine)

    report = figures

    def state_dict(self) -> dict[str, Any]:
        """Residuals of all workers in full, counters, plan and costs. Collective: all workers call it.

        Returns:
            Plain values and tensors, for the checkpoint that one worker writes: on rank 0 with the residuals of all,
            elsewhere without. Empty with plain DDP.

        Raises:
            OSError: On all workers, if one could not make its part.
        """
        if (engine := self.engine) is None:
            return {}
        settings, (number, shards) = self._settings.describe(), self._model.place
        with during("the making of a state"):
            if shards == 1:
                return save(engine, settings, _WHERE, inside=True)
            whole = gathered(local_state(engine)["memory"], self._model)
            return {} if number else save(engine, settings | OTHER_SHARDS, _WHERE, inside=True, memory=whole)

    def distributed_state_dict(self) -> dict[str, Any]:
        """The same for ``torch.distributed.checkpoint.save``, where each worker writes its own. Collective.

        Returns:
            Of each worker its residuals, sharded as the parameters are, and bytes. Empty with plain DDP.

        Example::

            dcp.save({"model": model_state, "safusion": handle.distributed_state_dict()}, checkpoint_id=path)
            ...
            handle.load_distributed(path)
        """
        if self.engine is None:
            return {}
        with during("the making of a state"):
            return distributed_state(self.engine, self._settings.describe(), self._model)

    def load_distributed(self, checkpoint: str | PathLike[str] | StorageReader, key: str = "safusion") -> None:
        """Restores what :meth:`distributed_state_dict` has returned, on any mesh of workers. Collective.

        On the same mesh training goes on bit for bit. On as many replicas each keeps its residuals; on others each
        takes the mean of all. What cannot be used is named in a warning, and begins empty on all workers.

        Args:
            checkpoint: Folder of ``torch.distributed.checkpoint.save``, or what reads it.
            key: Under which the state was saved.

        Raises:
            ValueError: On all workers, if the state is damaged.
        """
        if not self._bound:
            self._resume = partial(self.load_distributed, checkpoint, key)
            return
        with during("the restoring of a state"):
            saved = DistributedCheckpoint(checkpoint, key, self._model)
            if not saved.entry:
                self._say([f"{checkpoint} has no residuals under {key!r}"])
            elif (engine := self._engine_for(saved.entry)) is not None:
                self._say(saved.restore(engine, self._settings.describe()))

    def _engine_for(self, entry: Mapping[str, Any]) -> Engine | None:
        """The engine, also where all is dense: what a residual holds leaves with the first gradients."""
        if self.engine is None and self._bound and entry.get("holds_back"):
            self._holds_back = True
            self.bind(self._optimizers)
        return self.engine

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` has returned on rank 0. Collective: all workers call it with the same.

        On another number of workers each takes the mean of all residuals. What cannot be used is named in a warning,
        and begins empty on all workers.

        Raises:
            ValueError: On all workers, if the state is damaged, or some of them have none.
        """
        if not self._bound:
            self._resume = partial(self.load_state_dict, state)
        if self._transport is None:
            return
        with during("the restoring of a state"):
            given = self._transport.gather_objects(bool(state))
            if not all(given):
                if any(given):
                    raise ValueError(
                        f"rank {given.index(False)} has no state, rank {given.index(True)} has one: give all workers "
                        "that of rank 0"
                    )
                return
            if (engine := self._engine_for(state)) is None:
                return
            read = partial(parts.read, _WHERE, entry=state)
            self._say(restore(engine, self._settings.describe(), state, _WHERE, scattered(read, self._model)))

    def _say(self, notes: Sequence[str]) -> None:
        if notes:
            rank_zero_warn(f"SAFusion resumes with differences: {'; '.join(notes)}.")

    def close(self) -> None:
        """Gives the gradients back to DDP, and their momentum to the optimizers; residuals are lost. Collective."""
        if not self._handles:
            return  # somebody else may have the model
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave("it was closed")
        self._model.release()
