"""Output of callbacks on a terminal that may be drawing a progress bar."""

from __future__ import annotations

from io import StringIO

import rich
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from rich.console import Console, RenderableType


def print_table(trainer: Trainer, table: RenderableType) -> None:
    """Prints on rank 0, above a progress bar that is being drawn."""
    if not trainer.is_global_zero:
        return
    bar, console = trainer.progress_bar_callback, rich.get_console()
    if isinstance(bar, TQDMProgressBar) and trainer.training and bar.is_enabled:
        text = StringIO()
        Console(file=text, width=console.width).print(table)
        bar.print(text.getvalue())
    else:
        console.print(table)
