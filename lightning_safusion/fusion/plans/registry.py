"""Fusion policies by name."""

from __future__ import annotations

from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.per_tensor import Espresso, HiPress
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, Cupcake, FusionPolicy, Naive, Single
from lightning_safusion.fusion.plans.selective import Selective
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.registry import Registry

#: Those that are known by name.
POLICIES: tuple[type[FusionPolicy], ...] = (
    Adaptive, Aligned, Cupcake, Espresso, HiPress, Horovod, MGWFBP, Naive, OMGS, Selective, Single, WFBP,
)  # fmt: skip
_OWN: dict[str, type[FusionPolicy]] = dict(sorted([("behind", Aligned), *((each.name, each) for each in POLICIES)]))
_REGISTRY: Registry[FusionPolicy] = Registry("fusion policy", FusionPolicy, _OWN, "groupings", "a FusionPolicy")


def resolve_fusion(spec: str | FusionPolicy) -> FusionPolicy:
    """The policy that ``spec`` names, with its default options; a policy is returned as it is.

    Args:
        spec: ``"adaptive"``, ``"aligned"``, ``"behind"`` (aligned; its system sets the scope), ``"cupcake"``,
            ``"espresso"``, ``"hipress"``, ``"horovod"``, ``"mgwfbp"``, ``"naive"``, ``"omgs"``, ``"selective"``,
            ``"single"``, ``"wfbp"``, one that an installed package adds, or a policy.

    Raises:
        TypeError: If it is neither a name nor a policy.
        ValueError: If no policy has this name.
        RuntimeError: If an installed package's policy cannot be made.
    """
    return _REGISTRY.resolve(spec)
