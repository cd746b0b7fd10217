"""All that one fit makes: who exchanges the gradients, over which transport, for which parameters and optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion.announce import announce
from lightning_safusion.baselines import hook_exchange
from lightning_safusion.comm.transport.interface import Transport, WorkerLostError, during
from lightning_safusion.comm.transport.lockstep import VALIDATION, Lockstep, OutOfStepError
from lightning_safusion.fusion.build import JobTraits, check_equal, fingerprint
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.state import carried, restore_carried
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.exchange import Choice, GradientExchange, Mode, choose
from lightning_safusion.integration.inputs import Inputs
from lightning_safusion.integration.meeting import EpochEnd, between_batches, more_batches, validates
from lightning_safusion.integration.optimizer import needs_plain_ddp, suited
from lightning_safusion.integration.options import ddp_options, refuse_python_reducer, training_options
from lightning_safusion.integration.parameters import (
    describe_untrained,
    managed,
    members,
    needing,
    replaced_parameters,
    same,
    share_parameters,
    trainable,
    untrained,
)
from lightning_safusion.integration.signals import DeferredSignals
from lightning_safusion.integration.uneven import Team

if TYPE_CHECKING:
    from lightning_safusion.strategy import SAFusionStrategy


class Fit:
    """One fit of a strategy; a new one takes its place when it has ended.

    Args:
        strategy: Has the model, the optimizers, and what outlives a fit.

    Attributes:
        exchange: Averages the gradients.
        choice: Who that is, and why.
        transport: Carries them; None before the model is wrapped.
        lockstep: Where workers wait for each other, in a fit of several; None elsewhere.
        inputs: The batches of all workers.
        decided: Why plain DDP has taken the engine's place.
        deserted: An error has ended it, and some ranks did not come to save its state.
    """

    def __init__(self, strategy: SAFusionStrategy) -> None:
        self._strategy = strategy
        self.exchange, self.choice = GradientExchange(), Choice(Mode.PLAIN)
        self.transport: Transport | None = None
        self.lockstep: Lockstep | None = None
        self.inputs = Inputs()
        self._begun = False
        self.decided: str | None = None
        self.deserted = False
        self._signals: DeferredSignals | None = None  # during training with an engine
        self._epoch_end = EpochEnd()
        self._wrapped: list[tuple[str, nn.Parameter]] = []  # trainable parameters that DDP knows
        self._present: set[str] = set()  # parameters that the model had when it was first wrapped, also frozen ones
        self._untrained: list[str] = []  # those that no optimizer has
        self._bound: list[object] = []  # members of the optimizers that the exchange is bound to
        self._begins = True  # no batch was trained on

    @property
    def engine(self) -> Engine | None:
        """The one that exchanges the gradients, if one does."""
        return self.exchange.engine

    @property
    def interrupted(self) -> bool:
        """Whether an error is ending training."""
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def epoch(self) -> int:
        """That of the model."""
        module = self._strategy.lightning_module
        return module.current_epoch if module is not None else 0

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The wrapped model, also where it has been compiled since; None outside training."""
        model = getattr(self._strategy.model, "_orig_mod", self._strategy.model)
        return model if isinstance(model, DistributedDataParallel) else None

    # Beginning

    def begin(self, trainer: Trainer) -> None:
        """Training is about to be set up. Once."""
        if self._begun:
            return
        self._begun = True
        strategy = self._strategy
        self.decided = strategy._learned.get("plain_ddp")  # by another fit of the job
        group = strategy._ddp_kwargs.get("process_group")
        if group is None or dist.get_world_size(group) == strategy.world_size:
            # torch waits for ever for a store whose worker stands still: all are asked whether they are there, before
            # and after it is needed
            strategy.barrier("set-up begins")
            with during("set-up, when workers make a process group for their meetings"):
                asked = partial(more_batches, trainer), partial(between_batches, trainer), partial(validates, trainer)
                self.lockstep = Lockstep.of_all(strategy.root_device, strategy._timeout, *asked)
            strategy.barrier("set-up goes on")
        team = None
        if (lockstep := self.lockstep) is not None:
            self._epoch_end.attach(trainer, lockstep)
            team = partial(Team, strategy._timeout, lockstep.check, self.exchanging)
        self.inputs = Inputs(strategy.uneven_inputs, strategy.weighting, strategy.world_size, team)

    def share_weights(self) -> None:
        """All workers get the parameters of the first, where theirs have the same names and shapes. Collective.

        Where they have not, or only some have ``init_sync=False``, the set-up names the difference.
        """
        model, options = self._strategy.model, self._strategy._ddp_kwargs
        if model is not None:
            with during("set-up, when workers get the parameters of the first one"):
                share_parameters(model, options.get("process_group"), options.get("init_sync", True))

    def begin_training(self) -> None:
        """The first batch follows; also of a search for the learning rate, a training inside of another one."""
        self._begins = True
        self._defer_signals()

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Chooses who exchanges the gradients, and wraps the model as that needs it. Collective."""
        refuse_python_reducer()
        strategy = self._strategy
        options = dict(strategy._ddp_kwargs)
        self._wrapped = trainable(model)
        self._present = self._present or {name for name, _ in model.named_parameters()}
        strategy.settings = suited(strategy.settings, strategy.optimizers)
        specs = strategy.gradient_specs(model)
        with during("set-up, when workers make a process group for their gradients"):
            self.transport = transport = strategy._make_transport(model)
        entry = strategy._checkpoints.entry
        checked = {"system": strategy.system, "checkpoint": str(entry.get("nonce"))} | ddp_options(options)
        checked |= {"sync_batchnorm": str(strategy._layer_sync is not None)}
        checked |= {"uneven_inputs": strategy.uneven_inputs, "weighting": strategy.weighting}
        # before the tensors, of which thousands may differ as well
        hosts = check_equal(transport, checked | fingerprint(strategy.settings, specs))
        if strategy._hook is not None:
            self.choice = Choice(Mode.HOOK, f"system={strategy.system!r} asks for it")
            self.exchange = hook_exchange(strategy._hook, transport, options.get("process_group"))
        else:
            sends_residual = bool(entry.get("holds_back")) or self.choice.mode is Mode.DENSE_ENGINE  # wrapped again
            job = (strategy.settings, specs, strategy.optimizers, transport.world_size, strategy._over_horovod)
            self.choice = choose(*job, sends_residual, self.decided)
            if self.choice.plain_ddp is None:
                self.exchange = self._make_engine(model, specs, transport, hosts)
        # On the current stream, whatever the Lightning version: gradient hooks run on the stream of this construction
        options = self.exchange.ddp_options(options)
        with during("set-up, when DDP compares and copies the parameters"):
            return DistributedDataParallel(module=model, device_ids=strategy.determine_ddp_device_ids(), **options)

    def _make_engine(
        self, model: nn.Module, specs: Sequence[TensorSpec], transport: Transport, hosts: Sequence[str]
    ) -> EngineExchange:
        strategy = self._strategy
        automatic = strategy.lightning_module is not None and strategy.lightning_module.automatic_optimization
        left = untrained(model, strategy.optimizers)
        before, self._untrained = self._untrained, [name for name, _ in left]
        if left and self._untrained != before:
            announce(describe_untrained(left, automatic))
        return EngineExchange(
            strategy.settings,
            specs,
            self.choice,
            transport,
            strategy.root_device,
            JobTraits(node=strategy.node_rank, plain_ddp_allowed=not strategy._over_horovod, hosts=hosts),
            strategy._ddp_kwargs,
            automatic=automatic,
            observers=strategy._observers,
            untrained=left,
        )

    def register(self) -> None:
        """Registers the exchange's hooks on the wrapped model."""
        if (reason := self.choice.plain_ddp) is not None:
            unsealed = "" if self._strategy.settings.integrity is None else "; its sums have no checksums"
            announce(f"{self.choice.mode.value} is used, because {reason}{unsealed}")
        if self.ddp is not None:
            self.exchange.register(self.ddp)

    def bind(self) -> None:
        """Ties the exchange to the optimizers, after all workers have compared theirs. Collective in a fit."""
        strategy = self._strategy
        self._bound = members(strategy.optimizers)
        module = strategy.lightning_module
        if self.transport is not None and module is not None:
            # workers that train weights of their own may have different optimizers
            optimizers = strategy.optimizers if self.exchange.replicates else []
            checked = training_options(module.trainer, module, optimizers)
            if strategy.uneven_inputs != "error":  # a way to have different numbers of batches
                checked.pop("limit_train_batches")
            check_equal(self.transport, checked)
        self.exchange.bind(strategy.optimizers, getattr(strategy.precision_plugin, "scaler", None))

    # Wrapping again

    def follow(self, batch_idx: int) -> None:
        """Follows signals, optimizers, costs and trainable parameters; a RuntimeError if ranks have different ones."""
        if self.lockstep is not None:
            self.lockstep.begin_batch(self.epoch, batch_idx)
        self._defer_signals()  # again after a search for the learning rate, which is a training inside of this one
        if self._signals is not None:
            self._signals.deliver()
        self._follow_optimizers()
        self._follow_costs()
        if batch_idx == 0 or self._begins:  # one that is resumed may begin in the middle of an epoch
            self._follow_trainable()
        self._begins = False

    def _follow_trainable(self) -> None:
        if self.ddp is None or self.transport is None:
            return
        # DDP knows the parameters of its making only
        module, late = self.ddp.module, dict(self._late(self.ddp.module))
        with needing(True, self._resting(module)):
            replaced = replaced_parameters(module, self._wrapped, self.transport, self.epoch, late)
        if replaced is not None:
            self._wrap_again(replaced)

    def _late(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Parameters that no optimizer has, of modules made since the model was first wrapped: no concern of DDP."""
        left = untrained(model, self._strategy.optimizers)
        return [(name, param) for name, param in left if name not in self._present]

    def _resting(self, module: nn.Module) -> list[nn.Parameter]:
        """Frozen parameters that DDP goes on with, as unused ones: where parts take turns, a batch ends with some."""
        if not self._strategy._ddp_kwargs.get("find_unused_parameters"):
            return []
        now = dict(managed(module))
        return [param for name, param in self._wrapped if now.get(name) is param and not param.requires_grad]

    def _follow_optimizers(self) -> None:
        strategy = self._strategy
        if self.ddp is None or same(members(strategy.optimizers), self._bound):
            return
        left = [name for name, _ in untrained(self.ddp.module, strategy.optimizers) if name in self._present]
        other = suited(strategy.settings, strategy.optimizers)
        if self.engine is not None and other is not strategy.settings:
            before, after = strategy.settings.memory.name, other.memory.name
            announce(f"memory={after!r} takes the place of {before!r} with these optimizers: what that held is lost")
        others = left != self._untrained or other is not strategy.settings
        if self.engine is not None and (others or needs_plain_ddp(strategy.optimizers)):
            self._wrap_again()
        else:
            self.bind()
            self._follow_trainable()  # what was made after the model was wrapped may have an optimizer now

    def _follow_costs(self) -> None:
        if self.engine is None or self._strategy._over_horovod:
            return
        if (reason := self._strategy._history.why_aside(self.engine)) is not None:
            if self._signals is not None:
                self._signals.ask()
            self.go_plain(reason)

    def go_plain(self, reason: str) -> None:
        """Changes to plain DDP, for a reason that follows a "because"; no residual remains."""
        self.decided = reason
        self._wrap_again(keep=False)
        self._strategy.settings.memory.bind([0], self._strategy.root_device)

    def _wrap_again(self, replaced: Sequence[str] = (), keep: bool = True) -> None:
        """The next engine gets what this one ``keep``s, but for the residuals of parameters that were ``replaced``."""
        strategy, ddp = self._strategy, self.ddp
        if ddp is None:
            return
        engine, state = self.engine, None
        if engine is not None:
            engine.settle()
            strategy._history.keep(engine)
            state = carried(engine, replaced) if keep else None
        self.exchange.close()
        if self.transport is not None:
            self.transport.close()
        self.exchange = GradientExchange()
        compiles = getattr(strategy.model, "dynamo_ctx", None)  # what torch.compile was asked to do, if it was
        strategy.model = module = ddp.module
        del engine, ddp
        gc.collect()  # the old reducer leaves its hooks on the parameters until it is destroyed
        with needing(False, [param for _, param in self._late(module)]), needing(True, self._resting(module)):
            strategy.model = self.wrap(module)
            self.register()
        if self.engine is not None and state is not None:
            restore_carried(self.engine, state)
        elif self.engine is None and self._signals is not None and self.transport is not None:
            self._signals.hand_over(self.transport)  # there are no messages that could carry notices
        self.bind()
        if compiles is not None:
            strategy.model = compiles(strategy.model)

    # Signals, and where workers wait for each other

    def _defer_signals(self) -> None:
        """Has all ranks act on a signal before the same batch, from now on, while there is an engine."""
        if self.engine is not None and self._signals is None:
            self._signals = DeferredSignals(lambda: self.engine, self._strategy.cluster_environment)
            self._signals.install()

    def meet(self, what: str) -> None:
        """Waits for all workers of the fit where validation, or what follows the last batch, begins. Collective."""
        if self.lockstep is not None:
            with during(f"{what} in {self._strategy._place}"):
                self.lockstep.meet(what)

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """Names where a worker was lost, or the place where another one waits, in what may exchange gradients."""
        explained = nullcontext() if self.lockstep is None else self.lockstep.explained()
        with during(f"{what} in {self._strategy._place}"), explained:
            yield

    def pause(self) -> None:
        """Validation begins: signals are Lightning's meanwhile. Collective."""
        self.meet(VALIDATION)
        if self._signals is not None:
            self._signals.release()
        self.exchange.pause()

    def resume(self) -> None:
        """Validation has ended."""
        self.exchange.resume()
        if self._signals is not None:
            self._signals.install()

    # Ending

    def finish(self) -> None:
        """The last batch was trained on. Collective."""
        self.meet("the end of training")
        if self._signals is not None:
            self._signals.release()
            self._signals = None
        self.exchange.finish()

    def abandon(self, error: BaseException) -> None:
        """An error ends training; nothing waits for other workers, which may be gone."""
        if self.lockstep is not None and not isinstance(error, (WorkerLostError, OutOfStepError)):
            self.lockstep.leave(error)
        if self._signals is not None:
            self._signals.remove()
            self._signals = None
        self.exchange.abandon()
        if self.transport is not None:
            self.transport.abandon()
        if self.lockstep is not None:
            self.lockstep.rest()  # its group ends with the default one, or with the process
            self.lockstep = None
        self.inputs.abandon()

    def close(self) -> None:
        """Drops all of it; the history keeps the engine, whose residuals may still be saved."""
        engine, history = self.engine, self._strategy._history
        self.exchange.close()
        if engine is not None:
            history.keep(engine)
            history.last = engine
            engine.release()
            if not self.interrupted:  # else the device may still wait for a worker that is lost
                engine.space.memory.to_host()
        if self.transport is not None:
            self.transport.close()
        self.inputs.close()
        if self.lockstep is not None:
            self.lockstep.close()
        self._epoch_end.detach()
