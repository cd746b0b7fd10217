"""A user's own job: model, data and trainer from a LightningCLI file or from two classes, without what writes."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningDataModule, LightningModule, callbacks
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry

from lightning_safusion.integration.model_parallel import SAFusionModelParallelStrategy
from lightning_safusion.lookup import suggestion
from lightning_safusion.tools.bench.files import fit_alone, read_files

# Arguments of the Trainer that say what it shows, validates and writes: a benchmark has its own.
_OWN_ARGUMENTS = (
    *("logger", "callbacks", "strategy", "profiler", "default_root_dir", "barebones", "fast_dev_run"),
    *("min_epochs", "min_steps", "max_time", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_autolog_hparams"),
)
# Of Lightning's callbacks those that change a training step, and write nothing.
_KEPT = ("GradientAccumulationScheduler", "BaseFinetuning", "WeightAveraging")


@dataclass(frozen=True)
class JobOptions:
    """What :func:`~lightning_safusion.tools.bench.run.run_bench` was given: the same in every process."""

    config: Sequence[str] = ()
    model: str | None = None
    data: str | None = None
    cli: str | None = None
    systems: Sequence[str] = ()
    density: Sequence[float] = ()
    workers: int | None = None
    keep_callbacks: Sequence[str] = ()
    rounds: int = 4
    block: int = 6
    warmup: int = 45
    minutes: float = 10.0
    calibrate: bool = True
    seed: int = 0
    output: str | Path = "safusion_bench"


class _Base(LightningCLI):
    """What a LightningCLI of the user's own calls in place of LightningCLI; some arguments are those of the command."""

    commanded: ClassVar[Mapping[str, Any]] = {}
    #: Subcommands that there are not, whose parsers the user's class may have options for.
    others: ClassVar[Collection[str]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = list(signature(LightningCLI.__init__).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        options = given.get("parser_kwargs") or {}
        given["parser_kwargs"] = {name: each for name, each in options.items() if name not in self.others}
        super().__init__(**{**given, **self.commanded})


class _CLI(LightningCLI):
    """Parses a file as ``fit`` would, and builds its classes when it is ``ready``; never runs a trainer."""

    def __init__(self, keep_callbacks: Sequence[str]) -> None:
        self.ready = False
        self.left_out: list[str] = []
        self._keep = keep_callbacks
        super().__init__()

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    @property
    def settings(self) -> Any:
        return self.config["fit"]

    def before_instantiate_classes(self) -> None:
        trainer = self.settings["trainer"]
        given = trainer.get("callbacks")
        kept = []
        for entry in given if isinstance(given, list) else [given] if given is not None else []:
            name = entry["class_path"]
            if keeps(_imported(name.replace(":", ".")), self._keep):
                kept.append(entry)
            else:
                self.left_out.append(name.rpartition(".")[2])
        for name in ("logger", "profiler"):
            if trainer.get(name) not in (None, True, False):
                self.left_out.append(f"the {name}")
        trainer["callbacks"], trainer["logger"], trainer["profiler"] = kept or None, False, None

    def instantiate_classes(self) -> None:
        if self.ready:
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A trainer is made for every turn."""


@dataclass
class Job:
    """A job that is parsed, and built later: then every process has been started."""

    trainer: dict[str, Any]  # arguments of the Trainer, without those that a benchmark has of its own
    strategy: DDPStrategy | SAFusionModelParallelStrategy  # the user's, which has never been used
    group: dict[str, Any]  # arguments of DDPStrategy that the process group is made with: the user's
    left_out: list[str]  # what the benchmark leaves out, in words
    content: dict[str, Any]  # the user's file; empty without one
    _cli: _CLI
    callbacks: list[Callback] = field(default_factory=list)

    def build(self) -> tuple[LightningModule, LightningDataModule | None]:
        """Makes the model, the data and the callbacks that are kept; once."""
        self._cli.ready = True
        self._cli.instantiate_classes()
        made = vars(self._cli.config_init["fit"]["trainer"])
        self.trainer = {name: value for name, value in made.items() if name not in _OWN_ARGUMENTS}
        self.strategy = _user_strategy(made.get("strategy"))
        self.callbacks = list(made.get("callbacks") or [])
        return self._cli.model, self._cli.datamodule

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded inside of replicas."""
        return isinstance(self.strategy, SAFusionModelParallelStrategy)

    @property
    def ddp_options(self) -> dict[str, Any]:
        """Arguments of the strategy that hold for every row: those of the user's, without its hook."""
        strategy = self.strategy
        options: dict[str, Any] = dict(
            strategy.sizes if isinstance(strategy, SAFusionModelParallelStrategy) else strategy._ddp_kwargs
        )
        if strategy._process_group_backend is not None:
            options["process_group_backend"] = strategy._process_group_backend
        if isinstance(strategy._timeout, timedelta):
            options["timeout"] = strategy._timeout
        return options


def parse_job(options: JobOptions) -> Job:
    """Reads the file and finds the classes; builds nothing."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python script.py` would find them
    model = _class(options.model, LightningModule, "model")
    data = _class(options.data, LightningDataModule, "data")
    own = _class(options.cli, LightningCLI, "cli")
    content, below_fit = read_files(options.config)
    if not options.config and model is None and own is None:
        raise ValueError("a job needs a file (--config) or a model (--model package.module:Class)")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        paths = [part for path in options.config for part in ("--config", fit_alone(path, folder))]
        commanded: dict[str, Any] = {
            **{name: kind for name, kind in (("model_class", model), ("datamodule_class", data)) if kind is not None},
            "save_config_callback": None,
            "seed_everything_default": options.seed,
            "args": ["fit", *paths] if below_fit else [*paths, "fit"],
            "run": True,
        }
        # before the user's class what a benchmark does otherwise, behind it what it is made with
        bases = (_CLI, _Base) if own is None else (_CLI, own, _Base)
        others = {*(own or LightningCLI).subcommands()} - {"fit"}
        cli = _made(type("_OwnCLI", bases, {"commanded": commanded, "others": others}), options)
    trainer = vars(cli.settings["trainer"])
    parsed = {name: value for name, value in trainer.items() if name not in (*_OWN_ARGUMENTS, "plugins")}
    return Job(parsed, DDPStrategy(), _group_options(trainer.get("strategy")), cli.left_out, content, cli)


def _made(kind: Callable[[Sequence[str]], _CLI], options: JobOptions) -> _CLI:
    try:
        return kind(options.keep_callbacks)
    except TypeError as error:
        if options.cli is None or "required" not in str(error):
            raise
        raise ValueError(f"--cli {options.cli} must be a class that is made without arguments: {error}") from error


def _group_options(strategy: Any) -> dict[str, Any]:
    given = vars(getattr(strategy, "init_args", None) or Namespace())
    return {name: given[name] for name in ("process_group_backend", "timeout") if given.get(name) is not None}


def _user_strategy(given: str | Strategy | None) -> DDPStrategy | SAFusionModelParallelStrategy:
    made: Any = given
    if given is None or given == "auto":
        made = DDPStrategy()
    elif isinstance(given, str) and given in StrategyRegistry:
        made = StrategyRegistry.get(given)
    if isinstance(made, SAFusionModelParallelStrategy):
        return made
    if not isinstance(made, DDPStrategy):
        name = given if isinstance(given, str) else type(given).__name__
        raise ValueError(
            f"the trainer's strategy is {name}: only jobs of DDP, SAFusionStrategy and SAFusionModelParallelStrategy "
            "are compared"
        )
    made._start_method = "popen"  # every process has been started before
    return made


def keeps(kind: type, named: Sequence[str]) -> bool:
    """Whether callbacks of a class train with the benchmark: they change a step and write nothing, or were named."""
    known = tuple(getattr(callbacks, name) for name in _KEPT if hasattr(callbacks, name))
    return kind.__name__ in named or (issubclass(kind, known) and kind.__module__.startswith("lightning."))


def _class(path: str | None, kind: type, what: str) -> Any:
    """A class by ``package.module:Class`` (or with a dot); None for None."""
    if path is None:
        return None
    found = _imported(path.replace(":", "."))
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"--{what} {path} is no {kind.__name__} of lightning.pytorch")
    return found


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {module!r} here or among the installed ones") from error
    if not hasattr(holder, name):
        raise ValueError(f"module {module!r} has no {name!r}.{suggestion(name, dir(holder))}")
    return getattr(holder, name)
