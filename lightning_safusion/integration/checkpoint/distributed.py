"""Residuals for ``torch.distributed.checkpoint``: every worker writes its own, and any mesh of workers reads them.

A residual has the keys of its worker among the replicas and of its parameter, and lies on the workers as the parameter
does: a sharded tensor of the parameter's shape. What is not a tensor is bytes, of one worker each.
"""

from __future__ import annotations

import io
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_safusion.announce import rank_zero_warn
from lightning_safusion.comm.transport.interface import during
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.state import common_state, local_state
from lightning_safusion.integration.checkpoint import parts
from lightning_safusion.integration.checkpoint.restoring import Read, restore
from lightning_safusion.integration.checkpoint.saving import header
from lightning_safusion.integration.wrapped import Wrapped

if TYPE_CHECKING:
    from lightning_safusion.integration.attached_state import AttachedState

Residuals = Mapping[str, Mapping[str, Tensor]]  # by field and name of the parameter
#: Has plans made anew.
OTHER_SHARDS = {"collective": "between other shards"}


def distributed_state(engine: Engine, settings: Mapping[str, str], model: Wrapped) -> dict[str, Any]:
    """What this worker gives to ``torch.distributed.checkpoint.save``, between two windows. Collective."""
    transport, (number, count) = engine.transport, model.place
    proposals = transport.gather_objects((uuid.uuid4().hex, engine.space.memory.holds))
    common = header(proposals[0][0], transport.world_size)
    state = local_state(engine)
    memory: Residuals = state["memory"]
    entry = common | {
        "holds_back": any(holds for _, holds in proposals),
        "settings": dict(settings),
        "engine": common_state(engine),
        "digests": [""] * transport.world_size,  # the library has its own way to notice what is missing
    }
    return {
        f"entry.{number}of{count}": _packed(entry),
        f"part.{number}of{count}.{transport.rank}": _packed(common | {"rank": transport.rank} | state | {"memory": {}}),
    } | {
        f"memory.{transport.rank}.{field}.{name}": model.whole(name, local)
        for field, tensors in memory.items()
        for name, local in tensors.items()
    }


class DistributedCheckpoint:
    """What :func:`distributed_state` returned, saved under a key by workers of any mesh; this worker reads alone.

    Args:
        checkpoint: Folder, or what reads it.
        key: Of the state in the checkpoint; empty: it is all of it.
        model: Whose replicas the workers are.

    Attributes:
        entry: Common to all replicas; empty if there is no such state.
    """

    def __init__(self, checkpoint: str | PathLike[str] | StorageReader, key: str, model: Wrapped) -> None:
        self._name, self._model = f"{checkpoint}", model
        self._reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
        self._prefix = f"{key}." if key else ""
        metadata = self._reader.read_metadata().state_dict_metadata
        self._found = {
            name.removeprefix(self._prefix): each for name, each in metadata.items() if name.startswith(self._prefix)
        }
        self._place = "{}of{}".format(*model.place)
        entries = [name for name in self._found if name.startswith("entry.")]
        self._same = f"entry.{self._place}" in entries
        self.entry: dict[str, Any] = {}
        if entries:
            self.entry = self._unpacked(f"entry.{self._place}" if self._same else min(entries))
        if self.entry and not self._same:
            self.entry["settings"] = self.entry["settings"] | OTHER_SHARDS

    def restore(self, engine: Engine, settings: Mapping[str, str]) -> list[str]:
        """Restores all of it as :func:`restore` does. Collective."""
        own: Residuals = local_state(engine)["memory"]

        def read(rank: int) -> dict[str, Any]:
            part = self.entry | {"rank": rank, "compressor": {}, "unstepped": []}
            if self._same:
                part = parts.load(io.BytesIO(self._packed(f"part.{self._place}.{rank}")), None, self.entry, rank)
            return part | {"memory": self._pieces(rank, own)}

        return restore(engine, settings, self.entry, self._name, read)

    def _load(self, state: dict[str, Any]) -> dict[str, Any]:
        named = {self._prefix + key: value for key, value in state.items()}
        with warnings.catch_warnings():  # that torch.distributed were not there: each worker reads what it needs alone
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                dcp.load(named, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:  # which no "except Exception" catches
                causes = [cause for cause, _ in error.failures.values()]
                raise OSError(f"{self._name} cannot be read: {causes[0]!r:.200}") from error
        return {key.removeprefix(self._prefix): value for key, value in named.items()}

    def _packed(self, key: str) -> bytes:
        data: bytes = self._load({key: b""})[key]
        return data

    def _unpacked(self, key: str) -> dict[str, Any]:
        entry: dict[str, Any] = torch.load(io.BytesIO(self._packed(key)), weights_only=True)
        return entry

    def _pieces(self, rank: int, own: Residuals) -> Residuals:
        """What lies here as ``own`` residuals do of those of a worker; empty where a parameter has another shape."""
        pieces: dict[str, dict[str, Tensor]] = {}
        wanted: dict[str, Tensor] = {}
        for key, found in self._found.items():
            if not key.startswith(f"memory.{rank}."):
                continue
            field, name = key.split(".", 3)[2:]
            pieces.setdefault(field, {})[name] = torch.empty(0, dtype=torch.float32)
            if (local := own.get(field, {}).get(name)) is not None:
                whole = self._model.whole(name, torch.zeros_like(local, device="cpu"))
                if isinstance(found, TensorStorageMetadata) and whole.shape == found.size:
                    wanted[key] = whole
        for key, tensor in self._load(wanted).items():
            field, name = key.split(".", 3)[2:]
            pieces[field][name] = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return pieces


def gathered(memory: Residuals, model: Wrapped) -> dict[str, dict[str, Tensor]]:
    """The residuals of one replica in full, on all of its workers, which call it alike."""
    full: dict[str, dict[str, Tensor]] = {field: {} for field in memory}
    for field in sorted(memory):
        for name in sorted(memory[field]):
            tensor: Any = model.whole(name, memory[field][name])
            full[field][name] = tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor
    return full


def scattered(read: Read, model: Wrapped) -> Read:
    """Reads parts with residuals in full, and takes this worker's pieces of them."""

    def pieces(rank: int) -> dict[str, Any]:
        part = read(rank)
        memory = {
            field: {name: model.piece(name, each) for name, each in tensors.items()}
            for field, tensors in part["memory"].items()
        }
        return part | {"memory": memory}

    return pieces


def _packed(values: Mapping[str, Any]) -> bytes:
    payload = io.BytesIO()
    torch.save(dict(values), payload)
    return payload.getvalue()


# Folders of Lightning's ModelParallelStrategy


def save_residuals(path: Path, attached: Sequence[AttachedState]) -> None:
    """Writes the residuals of all sharded models into a folder of a checkpoint. Collective."""
    if attached:
        with during(f"the save of {path / parts.ENTRY}"):
            states = {f"{number}": each.distributed_state_dict() for number, each in enumerate(attached)}
            dcp.save(states, checkpoint_id=path / parts.ENTRY)


def load_residuals(
    saved: Any, path: Path, attached: Sequence[AttachedState], broadcast: Callable[[bool], bool]
) -> None:
    """Restores what a checkpoint has of the residuals. Collective.

    Its entry, ``saved``, is the number of models whose residuals lie in its folder, or the states of one or several.
    """
    if not isinstance(saved, int):
        states = [saved] if isinstance(saved, dict) else saved
        _compare(len(states), attached, path)
        for each, state in zip(attached, states, strict=False):
            each.load_state_dict(state, path)
        return
    folder = path / parts.ENTRY
    if saved and not broadcast((folder / ".metadata").is_file()):
        rank_zero_warn(
            f"SAFusion resumes with differences: {folder} is not there, or was not written to its end, so that "
            "every worker begins with empty residuals: what the workers had accumulated and not sent yet is lost."
        )
        return
    _compare(saved, attached, path)
    for number, each in enumerate(attached[:saved]):
        each.load_distributed(folder, f"{number}")


def _compare(saved: int, attached: Sequence[AttachedState], path: Path) -> None:
    if saved and saved != len(attached):
        rank_zero_warn(
            f"SAFusion: {path} has residuals of {saved} sharded models, this one has {len(attached)}: they are "
            "taken in their order."
        )
