"""Files of LightningCLI: several as one, without what a benchmark does not run, and with another strategy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

_HOOK = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}  # no row's but the user's own


def read_files(paths: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Files of LightningCLI as one, of which later ones win; and whether they are written as below ``fit``.

    Raises:
        ValueError: If one is missing, or some have a section ``fit`` and others have not.
    """
    content: dict[str, Any] = {}
    forms = set()
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}: give a file of LightningCLI, or --model and --data")
        read = _read(path)
        forms.add("fit" not in read)
        content = _merged(content, _without_others(read))
    if len(forms) > 1:
        raise ValueError(f"of the files {', '.join(paths)} some have a section fit and others have not: use one form")
    return content, False not in forms


def _read(path: str) -> dict[str, Any]:
    return yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}


def _without_others(content: dict[str, Any]) -> dict[str, Any]:
    """A file without the sections of other subcommands, where it has one of ``fit``."""
    others = LightningCLI.subcommands().keys() - {"fit"} if "fit" in content else set()
    return {key: value for key, value in content.items() if key not in others}


def fit_alone(path: str, folder: str) -> str:
    """The file, or a copy in a folder without the sections of other subcommands."""
    content = _read(path)
    kept = _without_others(content)
    if kept.keys() == content.keys():
        return path  # paths in it count from where it is
    copied = Path(folder, f"{len(os.listdir(folder))}.yaml")
    copied.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return str(copied)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of both; of another ``class_path`` those of the second alone."""
    merged = dict(one)
    for key, value in other.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            same = value.get("class_path", before.get("class_path")) == before.get("class_path")
            merged[key] = _merged(before, value) if same else value
        else:
            merged[key] = value
    return merged


def with_strategy(content: Mapping[str, Any], strategy: Mapping[str, Any] | None) -> str:
    """A user's file with another strategy (None leaves the user's own), as YAML; the section of the trainer alone where
    there is no file. Of the user's own strategy the arguments of DDPStrategy stay, without those of a hook."""
    copy: dict[str, Any] = json.loads(json.dumps(content, default=str))
    inner = copy["fit"] if isinstance(copy.get("fit"), dict) else copy
    trainer = inner["trainer"] = dict(inner.get("trainer") or {})
    if strategy is not None:
        kept = _kept(trainer.get("strategy"), strategy["class_path"])
        trainer["strategy"] = {**strategy, "init_args": {**kept, **strategy["init_args"]}}
    elif not content:
        trainer["strategy"] = "ddp"
    return yaml.safe_dump(copy, sort_keys=False)


def _kept(strategy: Any, kind: str) -> dict[str, Any]:
    given = (strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}
    base = ModelParallelStrategy if kind.endswith("ModelParallelStrategy") else DDPStrategy
    known = signature(base).parameters.keys() - _HOOK
    return {name: value for name, value in given.items() if name in known}
