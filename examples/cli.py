"""LightningCLI: a training whose strategy is chosen in a YAML file or on the command line.

    python examples/cli.py fit --config examples/configs/names.yaml
    python examples/cli.py fit --config examples/configs/parts.yaml --trainer.strategy.density=0.1
    python examples/cli.py fit --trainer.strategy.help=SAFusionStrategy

The model and the data are those of ``safusion demo``. For your own, ``LightningCLI(YourModel, YourData)`` is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_safusion  # noqa: F401 - registers the names that `--trainer.strategy=...` takes
from lightning_safusion.demo.data import DigitsData
from lightning_safusion.demo.model import DigitsNet


class DigitsCLI(LightningCLI):
    """LightningCLI with defaults for the digits, so that a configuration holds what matters.

    Args:
        args: Arguments; those of the process by default.
        options: Further arguments of LightningCLI.
    """

    def __init__(self, args: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(DigitsNet, DigitsData, args=None if args is None else list(args), **options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Gives the model and the data their defaults; the learning rate falls to zero over ``trainer.max_steps``."""
        parser.link_arguments("trainer.max_steps", "model.steps")
        parser.set_defaults(
            {
                "seed_everything": 0,
                "trainer.max_steps": 100,
                "trainer.log_every_n_steps": 10,
                "model.widths": (8, 16, 32),
                "model.lr": 0.1,
                "data.batch_size": 32,
                "data.seed": 0,
            }
        )


if __name__ == "__main__":
    DigitsCLI()
