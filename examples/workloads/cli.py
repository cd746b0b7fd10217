"""LightningCLI whose model and data are classes named in the configuration, with defaults that all workloads share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_safusion  # noqa: F401 - registers the names that `--trainer.strategy=...` takes

CONFIGS = Path(__file__).parent / "configs"


class WorkloadCLI(LightningCLI):
    """LightningCLI for every workload; ``configs/defaults.yaml`` holds what they share.

    Args:
        args: Arguments; those of the process by default.
        options: Further arguments of LightningCLI.
    """

    def __init__(self, args: Sequence[str] | None = None, **options: Any) -> None:
        defaults = {"default_config_files": [str(CONFIGS / "defaults.yaml")]}
        run = options.get("run", True)
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,  # each model has the paper's
            save_config_kwargs={"overwrite": True},  # a requeued job writes its configuration again
            parser_kwargs={"fit": defaults, "validate": defaults, "test": defaults} if run else defaults,
            args=None if args is None else list(args),
            **options,
        )
