"""Checkpoints: an entry in the main checkpoint, and one part per rank with its residuals.

The entry is small and the same for all ranks: settings, counters, order, plan, agreed costs. Residuals differ between
ranks and are as large as the model, so each rank writes a part of its own. Lightning's own file writer has the parts
beside its file, in the folder ``last.ckpt.safusion``. Any other ``CheckpointIO`` may have paths that are no files, or
storage that rank 0 alone reaches: there the parts lie inside the checkpoint that rank 0 hands to it.

A number drawn for every checkpoint, the nonce, is in the entry, in the parts and in their names, so that a new
checkpoint never overwrites a part of the one that it replaces. The entry has a digest of every part. Everything is
plain values and tensors, so that any program can open it with ``weights_only=True``.
"""

from lightning_safusion.integration.checkpoint.parts import remove, sweep
from lightning_safusion.integration.checkpoint.restoring import restore
from lightning_safusion.integration.checkpoint.saving import save

__all__ = ["remove", "restore", "save", "sweep"]
