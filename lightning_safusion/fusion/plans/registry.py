"""Fusion policies by name."""

from __future__ import annotations

from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.merging import MGWFBP, OMGS
from lightning_safusion.fusion.plans.per_tensor import Espresso, HiPress
from lightning_safusion.fusion.plans.policy import WFBP, Aligned, Cupcake, FusionPolicy, Naive, Single
from lightning_safusion.fusion.plans.selective import Selective
from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.lookup import look_up

#: Those that are known by name.
POLICIES: tuple[type[FusionPolicy], ...] = (
    Adaptive, Aligned, Cupcake, Espresso, HiPress, Horovod, MGWFBP, Naive, OMGS, Selective, Single, WFBP,
)  # fmt: skip


def resolve_fusion(spec: str | FusionPolicy) -> FusionPolicy:
    """The policy that ``spec`` names, with its default options; a policy is returned as it is.

    Args:
        spec: ``"adaptive"``, ``"aligned"``, ``"behind"`` (aligned; its system sets the scope), ``"cupcake"``,
            ``"espresso"``, ``"hipress"``, ``"horovod"``, ``"mgwfbp"``, ``"naive"``, ``"omgs"``, ``"selective"``,
            ``"single"``, ``"wfbp"``, or a policy.

    Raises:
        TypeError: If it is neither a name nor a policy.
        ValueError: If no policy has this name.
    """
    if isinstance(spec, FusionPolicy):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"fusion must be a name or a FusionPolicy, got {spec!r}")
    policies: dict[str, type[FusionPolicy]] = {policy.name: policy for policy in POLICIES}
    policies["behind"] = Aligned
    return look_up("fusion policy", spec, dict(sorted(policies.items())), "pass a FusionPolicy")()
