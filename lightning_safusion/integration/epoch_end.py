"""The end of an epoch, of which Lightning tells callbacks but not strategies."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_safusion.comm.transport.lockstep import Lockstep


class EpochEnd(Callback):
    """Has all workers meet before anything else at the end of an epoch: metrics that are reduced would wait for ever
    for workers that have more batches, or be taken for their gradients.
    """

    def __init__(self) -> None:
        self._lockstep: Lockstep | None = None
        self._callbacks: list[Callback] = []

    def attach(self, trainer: Trainer, lockstep: Lockstep) -> None:
        """Becomes the first callback of the trainer."""
        self.detach()
        self._lockstep = lockstep
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's callback connector
        self._callbacks.insert(0, self)

    def detach(self) -> None:
        """Undoes :meth:`attach`."""
        if self in self._callbacks:
            self._callbacks.remove(self)
        self._callbacks, self._lockstep = [], None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See the class."""
        if self._lockstep is not None:
            self._lockstep.end_epoch(trainer.current_epoch, exhausted=not _is_stopped(trainer))


def more_batches(trainer: Trainer) -> bool | None:
    """Whether batches of this epoch follow the present one on this worker; None where all workers stop here."""
    return None if _is_stopped(trainer) else not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def _is_stopped(trainer: Trainer) -> bool:
    """Whether an epoch ends before its last batch, on all workers alike."""
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
