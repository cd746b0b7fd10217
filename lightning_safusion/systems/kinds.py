"""The two kinds of system: parts for the engine, or DDP with another communication hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_safusion.baselines.hooks import DDPHookName
from lightning_safusion.comm.catalogue import find_collective
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.fusion.quota import QuotaRule, Scope


@dataclass(frozen=True)
class System:
    """What all systems have.

    Args:
        name: As in ``SAFusionStrategy(system=name)``.
        summary: What it decides, in one line.
        source: Where it was published.
    """

    name: str
    summary: str
    source: str


@dataclass(frozen=True)
class EngineSystem(System):
    """Parts of the engine; an argument of the strategy replaces the part of its name.

    Args:
        fusion: Grouping policy by name.
        compressor: Sparsifier by name.
        scope: ``"tensor"`` (before fusion) or ``"group"`` (after it).
        quota: ``"proportional"`` or ``"pooled"``.
        memory: Error feedback.
        collective: One of ``comm.catalogue.COLLECTIVES``.
        wire: Wire format.
        dense_below: Tensors of fewer elements are dense.
        dense_below_ndim: Tensors of fewer dimensions are dense.
        offload: Select from tensors on a thread of the host.
        own_buffers: Its dense buffers are what is compared: plain DDP never takes the engine's place.
    """

    fusion: str
    compressor: str = "topk"
    scope: Scope = "tensor"
    quota: QuotaRule = "proportional"
    memory: str = "residual"
    collective: str = "auto"
    wire: str = "auto"
    dense_below: int = 0
    dense_below_ndim: int = 0
    offload: bool = False
    own_buffers: bool = False

    #: No hook: the engine exchanges the gradients.
    ddp_hook: ClassVar[None] = None

    def policy(self) -> FusionPolicy:
        """The grouping policy with this row's options."""
        return Adaptive(rule="paper") if self.fusion == "adaptive-paper" else resolve_fusion(self.fusion)

    @property
    def sparse(self) -> bool:
        """Whether it sends less than all of every gradient."""
        return self.compressor != "none"

    @property
    def conserves(self) -> bool:
        """Whether the residual keeps all that is not sent: the tree of gTop-k drops entries on its way."""
        return find_collective(self.collective).conserves


@dataclass(frozen=True)
class HookSystem(System):
    """DDP with another communication hook; it has none of the engine's parts.

    Args:
        ddp_hook: The hook.
    """

    ddp_hook: DDPHookName

    #: All of every gradient is exchanged, or an approximation of it whose error stays with the hook.
    sparse: ClassVar[bool] = False
    conserves: ClassVar[bool] = True

    @property
    def elastic(self) -> bool:
        """Whether workers train on weights of their own, held together by a centre: replicas are not equal."""
        return self.ddp_hook == "local"
