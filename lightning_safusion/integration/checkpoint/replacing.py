"""When the parts of a checkpoint that was replaced go: once the file that replaces it is in place, never before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.integration.checkpoint import files
from lightning_safusion.integration.checkpoint.saving import reason


def has_files(plugin: CheckpointIO) -> bool:
    """Whether main checkpoints are files that Lightning itself writes, so that parts can lie beside them."""
    return type(plugin.checkpoint_io if type(plugin) is AsyncCheckpointIO else plugin) is TorchCheckpointIO


@dataclass(frozen=True)
class _UnderWay:
    """A main file that a thread of rank 0 may still be writing."""

    nonce: str | None  # of its parts, if it has any
    before: str | None  # fingerprint of the file in its place when it was handed over; known on rank 0


class Replacing:
    """The checkpoints of one strategy, of which some may still be written asynchronously.

    Every method is called on all ranks, for the same paths; what it does to files, a rank does on its own node.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, _UnderWay] = {}

    def settle(self, plugin: CheckpointIO, path: _PATH, transport: Transport) -> None:
        """Removes what an earlier asynchronous save to ``path`` has replaced. Collective if there was one.

        Raises:
            OSError: On all ranks, if that save failed.
        """
        earlier = self._under_way.get(str(path))
        if earlier is None:
            return
        failure = None
        if transport.rank == 0:
            try:
                self._wait(plugin, path)
            except Exception as error:
                failure = error
        raise_together(transport, failure, path)
        del self._under_way[str(path)]
        files.sweep(path, earlier.nonce)

    def before(self, plugin: CheckpointIO, path: _PATH, rank: int) -> str | None:
        """What :meth:`after` wants to know of the file that a save replaces; waits until that is in place."""
        if rank != 0 or type(plugin) is not AsyncCheckpointIO or not has_files(plugin):
            return None
        self._wait(plugin, path)
        return files.fingerprint(path)

    def _wait(self, plugin: CheckpointIO, path: _PATH) -> None:
        earlier = self._under_way.get(str(path))
        if earlier is not None and files.fingerprint(path) == earlier.before:
            plugin.teardown()  # waits for everything that was handed over; the plugin goes on with the next save

    def after(self, plugin: CheckpointIO, path: _PATH, nonce: str | None, before: str | None, sweeps: bool) -> None:
        """Ends a save.

        Args:
            plugin: It has been handed the main checkpoint.
            path: Of the main checkpoint.
            nonce: Of its parts; None if it has none.
            before: What :meth:`before` returned.
            sweeps: This rank removes files.
        """
        if not has_files(plugin):
            return
        if type(plugin) is AsyncCheckpointIO:
            self._under_way[str(path)] = _UnderWay(nonce, before)
        elif sweeps:
            files.sweep(path, nonce)

    def removed(self, plugin: CheckpointIO, path: _PATH, sweeps: bool) -> None:
        """Removes the parts of a main checkpoint that was removed."""
        self._under_way.pop(str(path), None)
        if sweeps and has_files(plugin):
            files.remove(path)

    def finished(self, sweeps: bool) -> None:
        """Removes what was replaced, now that nothing is written any more."""
        for path, earlier in self._under_way.items():
            if sweeps:
                files.sweep(path, earlier.nonce)
        self._under_way.clear()


def discard(plugin: CheckpointIO, path: _PATH, rank: int, nonce: str) -> None:
    """Removes this rank's part of a main checkpoint that could not be written, where it certainly was not.

    An asynchronous plugin may raise the error of an earlier save, and object stores an error after the object has
    arrived: those parts stay until the next save to ``path``.
    """
    if type(plugin) is TorchCheckpointIO and isinstance(url_to_fs(str(path))[0], LocalFileSystem):
        files.discard(files.side_folder(path), rank, nonce)


def raise_together(
    transport: Transport, failure: Exception | None, path: _PATH, undo: Callable[[], None] | None = None
) -> None:
    """Raises on all ranks if there was a failure on any. Collective.

    Args:
        transport: Of all ranks.
        failure: Of this rank.
        path: Of the main checkpoint.
        undo: Called on all ranks if there was one. Not where a rank has died: its file may be in place.
    """
    told = transport.gather_objects(None if failure is None else reason(failure))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed and undo is not None:
        undo()
    if failure is not None:
        raise failure
    if failed:
        raise OSError(f"{path} could not be saved: {'; '.join(failed)}")
