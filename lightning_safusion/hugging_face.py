"""The exchange below Accelerate, and below the Trainer of transformers.

    handler = SAFusionKwargs(density=0.02)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(handler)

    class SparseTrainer(SAFusionTrainerMixin, transformers.Trainer):
        safusion = {"density": 0.02}

Needs accelerate; importing :mod:`lightning_safusion` does not import this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]  # it has no types
from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]  # it has no types
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_safusion.announce import MisconfigurationException, rank_zero_warn
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB
from lightning_safusion.integration.attach import PARTS, attach, checked_parts
from lightning_safusion.integration.attached import Attached
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.systems import DEFAULT

_FILE = "safusion.pt"


class SAFusionKwargs(DistributedDataParallelKwargs):
    """How Accelerate wraps a model: in DDP, with the exchange of this package below it.

    The first step of a training is one of DDP, and shows which optimizers there are; :meth:`bind` says so before it.

    Args:
        density: Share of the elements to send, in (0, 1], or a schedule; None: one that suits the optimizers.
        system: A scheme by name; one that the engine serves.
        kwargs: ``compressor`` and the other parts of :func:`~lightning_safusion.attach`, and the fields of
            ``DistributedDataParallelKwargs``.

    Attributes:
        attached: What is below each model that was prepared.
        scaler: That of the accelerator, to be set before a model is prepared with ``mixed_precision="fp16"``.

    Raises:
        MisconfigurationException: If a system works without the engine.
        TypeError: If there is no such argument.
        ValueError: If a name or number is not one of the possible ones; if DDP is to have another hook.
    """

    def __init__(self, density: float | DensitySchedule | None = None, system: str = DEFAULT, **kwargs: Any) -> None:
        parts = {name: kwargs.pop(name) for name in PARTS if name in kwargs}
        checked_parts(system, density, parts)
        if hooked := [name for name in _HOOKS if name in kwargs]:
            raise ValueError(f"{hooked[0]}={kwargs[hooked[0]]!r} is another hook: DDP can have one alone. Leave it out")
        super().__init__(**{"bucket_cap_mb": OWN_BUCKETS_MB, "gradient_as_bucket_view": True} | kwargs)
        self._job: dict[str, Any] = {"density": density, "system": system, **parts}
        self.attached: list[Attached] = []
        self.scaler: torch.amp.GradScaler | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Accelerate looks a handler up by its class, where it knows its own alone."""
        return DistributedDataParallelKwargs

    def to_dict(self, ignore_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """The arguments of DDP."""
        names = [field.name for field in fields(DistributedDataParallelKwargs) if field.name not in _HOOKS]
        return {name: getattr(self, name) for name in names}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attaches to a model that Accelerate has wrapped, in the place of what it was attached to before.

        Raises:
            MisconfigurationException: If the loss is scaled, by a factor that is not known.
        """
        if self.scaler is None and PartialState._shared_state and AcceleratorState().mixed_precision == "fp16":
            raise MisconfigurationException(
                "mixed_precision='fp16' scales the loss, and residuals are kept without the factor: set handler.scaler "
                "= accelerator.scaler before accelerator.prepare, or use mixed_precision='bf16'"
            )
        for each in [each for each in self.attached if each.module is model.module]:
            each.close()
            self.attached.remove(each)
        self.attached.append(attach(model, scaler=self.scaler, **self._job))

    def bind(self, *optimizers: Optimizer) -> None:
        """Begins with these optimizers of the model that was prepared last. Collective.

        With one worker there is nothing to begin: Accelerate wraps no model.
        """
        if self.attached:
            self.attached[-1].bind(optimizers)
        else:
            rank_zero_warn(
                "SAFusion: Accelerate has wrapped no model in DDP, and nothing is exchanged. Call prepare before bind; "
                "several workers on CPUs need Accelerator(cpu=True)."
            )

    def state_dict(self) -> dict[str, Any]:
        """Residuals of all workers and what else training goes on with; see :meth:`Attached.state_dict`. Collective."""
        return {str(number): each.state_dict() for number, each in enumerate(self.attached)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` has returned. Collective."""
        for number, each in enumerate(self.attached):
            each.load_state_dict(state.get(str(number), {}))


_HOOKS = ("comm_hook", "comm_wrapper", "comm_state_option")


class SAFusionTrainerMixin:
    """Before ``transformers.Trainer``, or a subclass of it: gradients are exchanged as :func:`attach` does.

    Checkpoints get a file ``safusion.pt`` with the residuals of all workers.

    Attributes:
        safusion: Arguments of :class:`SAFusionKwargs`.
        handler: The one that Accelerate has.
    """

    safusion: ClassVar[Mapping[str, Any]] = {}
    handler: SAFusionKwargs
    accelerator: Any
    optimizer: Any
    args: Any

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        (given,) = args["kwargs_handlers"]
        self.handler = SAFusionKwargs(**{**given.to_kwargs(), **self.safusion})
        return args | {"kwargs_handlers": [self.handler]}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.handler.scaler = self.accelerator.scaler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        state = self.handler.state_dict()
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, _FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.handler.attached:
            self.handler.bind(self.optimizer)  # before a step
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and os.path.exists(file := os.path.join(checkpoint, _FILE)):
            self.handler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
