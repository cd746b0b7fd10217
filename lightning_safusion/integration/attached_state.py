"""What is attached, as a part of checkpoints: in one file, or where every worker writes its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import StorageReader
from torch.optim import Optimizer

from lightning_safusion.announce import rank_zero_warn
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.fusion.state import local_state
from lightning_safusion.integration.checkpoint import parts, restore, save
from lightning_safusion.integration.checkpoint.distributed import (
    OTHER_SHARDS,
    DistributedCheckpoint,
    distributed_state,
    gathered,
    scattered,
)
from lightning_safusion.integration.wrapped import Wrapped

_WHERE = "the state of lightning_safusion"


class AttachedState(ABC):
    """Saves and restores an engine below a wrapped model."""

    _transport: Transport | None = None

    def __init__(self, model: Wrapped, settings: EngineSettings) -> None:
        self._model, self.settings = model, settings
        self._resume: Callable[[], None] = partial(self.load_state_dict, {})  # of a state that came before optimizers
        self._optimizers: Sequence[Optimizer] | None = None  # that are bound
        self._holds_back = False  # a state had residuals

    @property
    @abstractmethod
    def engine(self) -> Engine | None:
        """The engine on this worker; None where plain DDP exchanges."""

    @abstractmethod
    def bind(self, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        """Begins with these optimizers."""

    def _bound_to(self, optimizers: Sequence[Optimizer]) -> None:
        """Restores what came before these optimizers were known."""
        self._optimizers = optimizers
        resume, self._resume = self._resume, partial(self.load_state_dict, {})
        resume()

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
        settings, (number, shards) = self.settings.describe(), self._model.place
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
            return distributed_state(self.engine, self.settings.describe(), self._model)

    def load_distributed(self, checkpoint: str | PathLike[str] | StorageReader, key: str = "safusion") -> None:
        """Restores what :meth:`distributed_state_dict` has returned, on any mesh of workers. Collective.

        On the same mesh training goes on bit for bit. On as many replicas each keeps its residuals; on others each
        takes the mean of all. What cannot be used is named in a warning, and begins empty on all workers.

        Args:
            checkpoint: Folder of ``torch.distributed.checkpoint.save``, or what reads it.
            key: Under which the state was saved.

        Raises:
            ValueError: On all workers, if the state is damaged, or not there.
        """
        if self._optimizers is None:
            self._resume = partial(self.load_distributed, checkpoint, key)
            return
        with during("the restoring of a state"):
            saved, notes, problem = None, [], ""
            try:
                saved = DistributedCheckpoint(checkpoint, key, self._model)
            except Exception as error:  # of the files, or of what they hold
                problem = f"{error!r:.300}"
            self._refuse(checkpoint, problem)
            if saved is None or not saved.entry:
                notes = [f"{checkpoint} has no residuals under {key!r}"]
            elif (engine := self._engine_for(saved.entry)) is not None:
                try:
                    notes = saved.restore(engine, self.settings.describe())
                except ValueError as error:  # on all replicas of this shard
                    problem = f"{error}"
            self._refuse(checkpoint, problem)
            # other shards may have lost what the first worker has
            self._say(list(dict.fromkeys(note for each in self._everyone(notes) for note in each)))

    def _refuse(self, checkpoint: object, problem: str) -> None:
        """Raises on all workers if one has a problem with a checkpoint."""
        if problems := [each for each in self._everyone(problem) if each]:
            raise ValueError(
                f"{checkpoint} is damaged ({problems[0]}): take another checkpoint, or delete this folder, of the "
                "residuals alone, to resume without them"
            )

    def _everyone(self, value: Any) -> list[Any]:
        """What all workers of all replicas give."""
        values = self._model.gather(value)
        if self._transport is not None:
            values = [each for some in self._transport.gather_objects(values) for each in some]
        return values

    def _engine_for(self, entry: Mapping[str, Any]) -> Engine | None:
        """The engine, also where all is dense: what a residual holds leaves with the first gradients."""
        if self.engine is None and self._optimizers is not None and entry.get("holds_back"):
            self._holds_back = True
            self.bind(self._optimizers)
        return self.engine

    def load_state_dict(self, state: Mapping[str, Any], path: str | Path = _WHERE) -> None:
        """Restores what :meth:`state_dict` has returned on rank 0. Collective: all workers call it with the same.

        On another number of workers each takes the mean of all residuals. What cannot be used is named in a warning,
        and begins empty on all workers.

        Args:
            state: Also the entry ``"safusion"`` of a checkpoint of :class:`~lightning_safusion.SAFusionStrategy`.
            path: Of the checkpoint, for such an entry, whose residuals lie beside it.

        Raises:
            TypeError: If it is none.
            ValueError: On all workers, if the state is damaged, or some of them have none.
        """
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                f"load_state_dict takes what state_dict has returned, got {state!r:.80} of type {type(state).__name__}"
            )
        if self._optimizers is None:
            self._resume = partial(self.load_state_dict, state, path)
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
            read = scattered(partial(parts.read, path, entry=state), self._model)
            self._say(restore(engine, self.settings.describe(), state, path, read))

    def _say(self, notes: Sequence[str]) -> None:
        if notes:
            rank_zero_warn(f"SAFusion resumes with differences: {'; '.join(notes)}.")
