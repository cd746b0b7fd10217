"""The exchange below Lightning Fabric's DDP: models and optimizers that are set up together, or apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_safusion.announce import rank_zero_warn
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB
from lightning_safusion.integration.attach import PARTS, attach, checked_parts
from lightning_safusion.integration.attached import Attached
from lightning_safusion.integration.checkpoint.parts import ENTRY
from lightning_safusion.integration.options import refuse_options, register_launchers
from lightning_safusion.sparsify.schedule import DensitySchedule
from lightning_safusion.systems import DEFAULT


class SAFusionFabricStrategy(DDPStrategy):
    """Fabric's DDP that sends sparsified gradients; see :class:`~lightning_safusion.SAFusionStrategy`.

    Where a model is set up without its optimizers, the first step is one of DDP: it shows which they are. Checkpoints
    with an optimizer have the residuals of all workers in the entry ``"safusion"``.

    Args:
        density: Share of the elements to send, in (0, 1], or a schedule; None: one that suits the optimizers.
        system: A scheme by name; one that the engine serves.
        kwargs: ``compressor`` and the other parts of :func:`~lightning_safusion.attach`, every argument of Fabric's
            ``DDPStrategy`` and of ``DistributedDataParallel``.

    Attributes:
        attached: What is below each model that was set up.

    Raises:
        MisconfigurationException: If an option of DDP contradicts this strategy.
        TypeError: If there is no such argument.
        ValueError: If a name or number is not one of the possible ones.

    Example::

        fabric = Fabric(accelerator="gpu", devices=8, num_nodes=4, strategy=SAFusionFabricStrategy(density=0.02))
    """

    def __init__(self, density: float | DensitySchedule | None = None, system: str = DEFAULT, **kwargs: Any) -> None:
        parts = {name: kwargs.pop(name) for name in PARTS if name in kwargs}
        refuse_options(kwargs, ["density", "system", *PARTS], DDPStrategy, SAFusionFabricStrategy.__name__)
        checked_parts(system, density, parts)
        super().__init__(**kwargs)
        self._job: dict[str, Any] = {"density": density, "system": system, **parts}
        self.attached: list[Attached] = []

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the names that ``Fabric(strategy=...)`` takes, as DDPStrategy does for ``ddp``."""
        register_launchers(strategy_registry, cls, (None, True))

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        size = self._ddp_kwargs.get("bucket_cap_mb") or OWN_BUCKETS_MB
        options = self._ddp_kwargs | {"bucket_cap_mb": size, "gradient_as_bucket_view": True}
        # on the current stream: hooks of gradients run on that of this construction
        wrapped = DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **options)
        scaler = getattr(self.precision, "scaler", None)
        self.attached.append(attach(wrapped, scaler=scaler, timeout=self._timeout, **self._job))
        return wrapped

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        given = super().setup_module_and_optimizers(module, optimizers, scheduler)
        self.attached[-1].bind(given[1])
        return given

    @override
    def save_checkpoint(self, path: _PATH, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if any(isinstance(each, Optimizer) for each in state.values()):  # others are of weights alone
            state = {**state, ENTRY: [each.state_dict() for each in self.attached]}
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(self, path: _PATH, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        saved: Sequence[Any] = rest.pop(ENTRY, ()) if state else ()
        if saved and len(saved) != len(self.attached):
            rank_zero_warn(
                f"SAFusion: {path} has residuals of {len(saved)} models, {len(self.attached)} were set up: they are "
                "taken in the order of set-up."
            )
        for each, own in zip(self.attached, saved, strict=False):
            each.load_state_dict(own)
        return rest
