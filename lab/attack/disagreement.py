"""One worker that was started with another setting: found at set-up, on all workers, with both values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lab.attack.job import Recipe, train
from lab.attack.trial import TIMEOUT, Verdict
from lab.attack.workers import End, Job
from lightning_safusion.integration.options import REFUSED_OPTIONS

#: Settings of the strategy, the trainer and the model, by kind.
Case = dict[str, dict[str, Any]]
_STEPS, _EACH, _LIMIT_S = 8, 4, 40.0
#: Another valid value of every argument of the strategy.
ARGUMENTS: dict[str, Any] = {
    "compressor": "gaussiank",
    "density": 0.07,
    "system": "saf-inter",
    "fusion": "single",
    "scope": "group",
    "quota": "pooled",
    "dense": ["*.bias"],
    "dense_below": 200,
    "dense_below_ndim": 2,
    "memory": "residual",
    "collective": "allgather",
    "wire": "fp16",
    "offload": True,
    "select_by": "gradient",
    "uneven_inputs": "join",
    "weighting": "samples",
    "integrity": "checksum",
}
#: Those that cannot be tried here.
ELSEWHERE = {"transport": "needs Horovod", "log_figures": "concerns the loggers of one worker alone"}
#: Of options whose default says nothing of other values.
_DDP_VALUES: dict[str, Any] = {"bucket_cap_mb": 10, "broadcast_buffers": False, "forward_sync_buffers": False}
#: Objects of a process, and what has no effect.
_DDP_OWN = {"module", "device_ids", "output_device", "dim", "process_group", "device_mesh"}
#: Another value of options of the trainer, beside those of :class:`lab.attack.job.Recipe`.
TRAINER: dict[str, Any] = {
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "value",
    "sync_batchnorm": True,
    "max_epochs": 1,
    "max_steps": 5,
    "min_steps": 20,
    "limit_train_batches": 3,
    "limit_val_batches": 0,
    "overfit_batches": 2,
    "val_check_interval": 3,
    "check_val_every_n_epoch": 2,
    "num_sanity_val_steps": 2,
    "reload_dataloaders_every_n_epochs": 1,
    "fast_dev_run": 2,
    "deterministic": True,
    "benchmark": True,
    "detect_anomaly": True,
    "inference_mode": False,
    "log_every_n_steps": 3,
    "use_distributed_sampler": False,
}
#: What may differ, since gradients, batches and meetings stay those of all.
HARMLESS = {
    "benchmark", "detect_anomaly", "inference_mode", "log_every_n_steps", "use_distributed_sampler", "min_steps",
    "reload_dataloaders_every_n_epochs", "timeout",
}  # fmt: skip
#: What the trainer makes of some.
_BECOMES = {"overfit_batches": "limit_train_batches", "fast_dev_run": "max_steps"}
_OPTIMIZERS = ("AdamW", "SGD", "RAdam")


class Disagreement:
    """One worker of two has another value of one setting; cases are taken in turn.

    Args:
        name: Of the attack.
        what: For the table.
        cases: Name of the setting, further settings of both workers, those of one.
    """

    def __init__(self, name: str, what: str, cases: Sequence[tuple[str, Case, Case]]) -> None:
        self.name, self.what, self.cases = name, what, cases

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """The next cases, and who differs."""
        places = [(number * _EACH + each) % len(self.cases) for each in range(min(_EACH, len(self.cases)))]
        return {"settings": [self.cases[place][0] for place in places], "places": places, "rank": choice.randint(0, 1)}

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Starts one job for each case."""
        reasons = set()
        for place in drawn["places"]:
            setting, both, one = self.cases[place]
            verdict = judged(_ends(both, one, drawn["rank"], folder), setting)
            if not verdict.held:
                return verdict
            reasons.add(verdict.reason)
        return Verdict(True, " or ".join(sorted(reasons)), len(drawn["places"]))


def _ends(both: Case, one: Case, rank: int, folder: Path) -> list[End]:
    """How two workers end, of which one has further settings."""

    def work(own: int, told: dict[str, Any]) -> None:
        strategy, trainer, model = (
            both.get(kind, {}) | (one.get(kind, {}) if own == rank else {}) for kind in ("strategy", "trainer", "model")
        )
        train(Recipe("default", _STEPS, workers=2, strategy=strategy, trainer=trainer, model=model), [], told)

    return Job(work, 2, folder).run(_LIMIT_S)


def judged(ends: Sequence[End], setting: str) -> Verdict:
    """Whether a difference was found, on all workers and with both values, or does no harm."""
    said = [end.said for end in ends]
    if all("RuntimeError" in end.raised and "different settings" in end.said for end in ends):
        named = all("rank 0 has" in each and "rank 1 has" in each for each in said)
        named = named and all(_BECOMES.get(setting, setting) in each or "parameter " in each for each in said)
        return Verdict(named, "found at set-up" if named else f"{setting}: not named: {said[0]:.200}")
    how = "; ".join(f"{end.how}: {end.said:.120}" for end in ends)
    if all(end.how == "finished" for end in ends) and setting in HARMLESS:
        equal = len({end.told["digest"] for end in ends}) == 1
        return Verdict(equal, "harmless, replicas equal" if equal else f"{setting}: replicas differ")
    return Verdict(False, f"{setting}: not found ({how})")


def _arguments() -> Disagreement:
    cases: list[tuple[str, Case, Case]] = [(name, {}, {"strategy": {name: value}}) for name, value in ARGUMENTS.items()]
    but = ", ".join(f"{name} {why}" for name, why in ELSEWHERE.items())
    return Disagreement("argument", f"one worker with another argument of SAFusionStrategy (not tried: {but})", cases)


def _ddp_options() -> Disagreement:
    cases: list[tuple[str, Case, Case]] = []
    for name, parameter in signature(DistributedDataParallel).parameters.items():
        if name in _DDP_OWN | REFUSED_OPTIONS.keys():
            continue
        value = _DDP_VALUES.get(name, not parameter.default if isinstance(parameter.default, bool) else None)
        if value is not None:
            cases.append((name, {}, {"strategy": {name: value}}))
    cases.append(("timeout", {}, {"strategy": {"timeout": timedelta(seconds=2 * TIMEOUT)}}))
    return Disagreement("ddp-option", "one worker with another option of DDP", cases)


def _trainer_options() -> Disagreement:
    both = {"gradient_clip_algorithm": {"trainer": {"gradient_clip_val": 0.5}}}
    cases = [(name, both.get(name, {}), {"trainer": {name: value}}) for name, value in TRAINER.items()]
    return Disagreement("trainer-option", "one worker with another option of the trainer", cases)


def _hyperparameters() -> Disagreement:
    cases: list[tuple[str, Case, Case]] = []
    for optimizer in _OPTIMIZERS:
        group = getattr(torch.optim, optimizer)([torch.zeros(1, requires_grad=True)], lr=1e-3).param_groups[0]
        for name, value in group.items():
            if (other := _other(name, value)) is not None:
                cases.append((name, {"model": {"optimizer": optimizer}}, {"model": {name: other}}))
    cases.append(("optimizers", {}, {"model": {"optimizer": "SGD"}}))
    return Disagreement("hyperparameter", "one worker with another hyperparameter of the optimizer", cases)


def _other(name: str, value: Any) -> Any:
    """Another valid value of a hyperparameter; None if it has none alone."""
    if name in ("params", "decoupled_weight_decay", "capturable", "differentiable", "nesterov", "dampening"):
        return None
    if isinstance(value, bool):
        return not value
    if value is None:  # foreach, fused
        return False
    if isinstance(value, tuple):
        return [0.5 * number for number in value]
    return value / 2 if value else 0.1


DISAGREEMENTS = (_arguments(), _ddp_options(), _trainer_options(), _hyperparameters())
