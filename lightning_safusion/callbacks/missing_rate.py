"""A callback that samples which tensors are missing: those of which a rank sent no element."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich.table import Table
from typing_extensions import override

from lightning_safusion.callbacks.base import StepSampler, print_table, run_directory, run_id, writing
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.literal import literal, plural
from lightning_safusion.metrics.figures import TensorFigures, tensor_figures
from lightning_safusion.metrics.history import MissingRateStatistics
from lightning_safusion.profiling.pictures import plot_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FILE = "missing_rate.json"


class TensorMissingRateMonitor(StepSampler[TensorFigures]):
    """Samples the share of gradient tensors of which no element is sent, over ranks; for every system.

    A tensor is missing on a rank in a step if it had a gradient and none of its elements was selected. Sampled steps
    wait for the device and reduce 48 bytes per tensor over the ranks; other steps cost nothing. With plain DDP nothing
    is sampled.

    Keys that are logged, each a share in [0, 1] of the sampled step:

    ========================================  =========================================================================
    ``safusion/missing_rate``                 tensors of which a rank sent no element, mean over ranks
    ``safusion/missing_on_all_ranks``         tensors of which no rank sent an element
    ``safusion/achieved_density``             elements that a rank sent, mean over ranks
    ``safusion/compression_error``            energy (squared norm) that was not sent, of tensors sent sparse
    ``safusion/missing_rate/<parameter>``     ranks that sent no element of it, with ``per_tensor=True``
    ========================================  =========================================================================

    At the end of training rank 0 prints the tensors that were missing most often, and writes ``missing_rate.json`` for
    reports (keys: ``MissingRateStatistics.summary``). Where the trainer starts processes of its own (spawn, fork), the
    statistics are in those: use ``heatmap_file``, or load a checkpoint.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.
        per_tensor: Also log the rate of every tensor.
        worst: Rows of the table at the end; 0 prints none.
        heatmap_file: Picture that rank 0 saves at the end of training.
        columns: Columns of the heat map, an even number; neighbours are merged when it is full.
        dirpath: Directory for ``missing_rate.json``; ``safusion`` in the first logger's directory by default, or in
            the trainer's ``default_root_dir``.

    Attributes:
        statistics: Of the samples of this fit; None before the first fit.

    Raises:
        ValueError: If ``every_n_steps`` is below 1 or ``worst`` below 0, or ``columns`` is odd or below 2.

    Example::

        monitor = TensorMissingRateMonitor(every_n_steps=20)
        trainer = Trainer(strategy=SAFusionStrategy(system="behind"), callbacks=[monitor])
        trainer.fit(model)
        monitor.heatmap().savefig("missing.png")
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        per_tensor: bool = False,
        worst: int = 10,
        heatmap_file: str | Path | None = None,
        columns: int = 128,
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        if worst < 0:
            raise ValueError(f"worst is a number of rows, 0 or more, got {worst}")
        MissingRateStatistics((), columns)  # refuses wrong columns now
        self.per_tensor = per_tensor
        self.worst = worst
        self.heatmap_file = Path(heatmap_file) if heatmap_file is not None else None
        self.columns = columns
        self.dirpath = dirpath
        self.statistics: MissingRateStatistics | None = None
        self._run_dir = Path()  # of this fit's files
        self._run = 0.0  # when this fit began

    @override
    def _begin(self, strategy: EngineReadings, trainer: Trainer, module: LightningModule) -> None:
        self.statistics = MissingRateStatistics([name for name, _ in module.named_parameters()], self.columns)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._run_dir = run_directory(trainer, self.dirpath)
        self._run = run_id(trainer)

    @override
    def _measure(self, strategy: EngineReadings) -> TensorFigures | None:
        return tensor_figures(strategy)

    @override
    def _values(self, figures: TensorFigures, step: int) -> dict[str, float]:
        values = self._sampled().add(step, figures)
        if self.per_tensor:
            rates = (figures.missing / figures.windows).tolist()
            values |= {f"missing_rate/{n}": r for n, r in zip(figures.names, rates, strict=True) if not isnan(r)}
        return values

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or self.statistics is None or not self.statistics.samples:
            return
        if self.worst and self.statistics.worst(1):
            print_table(trainer, self.table())
        elif self.worst:
            rank_zero_info(
                f"TensorMissingRateMonitor: no tensor was missing in {plural(self.statistics.samples, 'step')}."
            )
        if self.heatmap_file is not None:
            self.heatmap_file.parent.mkdir(parents=True, exist_ok=True)
            self.heatmap().figure.savefig(self.heatmap_file, dpi=120)
        with writing(self._run_dir):
            self._run_dir.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self.statistics.summary() | {"run": self._run}, allow_nan=False)
            (self._run_dir / FILE).write_text(content, encoding="utf-8")

    def table(self) -> Table:
        """The tensors that were missing most often, worst first.

        Raises:
            RuntimeError: If no fit has begun.
        """
        statistics = self._sampled()
        rate = float(statistics.missing.compute()) if statistics.samples else 0.0
        tensors, steps = plural(len(statistics.rows()), "tensor"), plural(statistics.samples, "step")
        table = Table(
            title=f"Tensors missing: {rate:.2%} of {tensors}, in {steps}",
            caption="missing: no element was sent, share of ranks and steps; everywhere: by no rank. "
            "error: energy that was not sent.",
        )
        table.add_column("tensor", overflow="fold")
        for column in ("missing", "everywhere", "density", "error"):
            table.add_column(column, justify="right")
        for row in statistics.worst(self.worst):
            error = "" if row.error is None else f"{row.error:.1%}"
            table.add_row(literal(row.name), f"{row.missing:.1%}", f"{row.everywhere:.1%}", f"{row.density:.2%}", error)
        return table

    def heatmap(self, ax: Axes | None = None) -> Figure | SubFigure:
        """Draws the missing rate by tensor (rows, in registration order) and step (columns).

        Args:
            ax: Where to draw; a new figure if there is none.

        Raises:
            RuntimeError: If no fit has begun.
            ValueError: If there is no sample yet.
        """
        statistics = self._sampled()
        if not statistics.samples:
            raise ValueError("nothing was sampled that could be drawn: lower every_n_steps or train longer")
        return plot_rates(statistics.names, statistics.steps, statistics.rates(), ax)

    def _sampled(self) -> MissingRateStatistics:
        if self.statistics is None:
            raise RuntimeError(
                "there are no statistics in this process: call it after fit; where the trainer starts processes of its "
                "own (spawn, fork), use heatmap_file, or load_state_dict with the callback's part of a checkpoint"
            )
        return self.statistics

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.statistics is None else {"statistics": self.statistics.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "statistics" not in state_dict:
            return
        loaded = MissingRateStatistics.from_state_dict(state_dict["statistics"])
        if self.statistics is not None and self.statistics.names != loaded.names:
            different = sorted(set(self.statistics.names) ^ set(loaded.names))
            rank_zero_warn(
                f"TensorMissingRateMonitor begins anew: the checkpoint's model differs in {', '.join(different[:8])}."
            )
            return
        self.statistics = loaded
