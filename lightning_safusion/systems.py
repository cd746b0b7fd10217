"""The table of systems: every published scheme is one row of parts."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType

from lightning_safusion.fusion.adaptive import Adaptive
from lightning_safusion.fusion.planning import CollectiveChoice
from lightning_safusion.fusion.policy import FusionPolicy
from lightning_safusion.fusion.quota import QuotaRule, Scope
from lightning_safusion.fusion.registry import resolve_fusion

# Tensors below this size (norms, biases) are a small share of the bytes; sent whole they are never stale.
_SMALL = 512


@dataclass(frozen=True)
class System:
    """One row: the parts that an argument of the strategy replaces when it is given.

    Args:
        name: As in ``SAFusionStrategy(system=name)``.
        summary: What it decides, in one line.
        source: Where it was published.
        fusion: Grouping policy.
        compressor: Sparsifier.
        scope: ``"tensor"`` (ahead of fusion) or ``"group"`` (behind it).
        quota: ``"proportional"`` or ``"pooled"``.
        memory: Error feedback.
        collective: ``"auto"``, ``"allgather"`` or ``"allreduce"``.
        wire: Wire format.
        dense_below: Tensors of fewer elements travel dense.
    """

    name: str
    summary: str
    source: str
    fusion: str
    compressor: str = "topk"
    scope: Scope = "tensor"
    quota: QuotaRule = "proportional"
    memory: str = "residual"
    collective: CollectiveChoice = "auto"
    wire: str = "auto"
    dense_below: int = 0

    def policy(self) -> FusionPolicy:
        """The grouping policy with this row's options."""
        return Adaptive(rule="paper") if self.fusion == "adaptive-paper" else resolve_fusion(self.fusion)


_SAFUSION = "SAFusion, HPDC 2025"
_ROWS = (
    System(
        "safusion",
        "every tensor sparsified ahead of fusion; buffers by the exact programme over measured times",
        f"{_SAFUSION} (inter- and intra-worker), with small tensors dense and an exact planner",
        "adaptive",
        dense_below=_SMALL,
    ),
    System(
        "safusion-paper",
        "as safusion, with the paper's greedy buffer rule, no dense tensors, all-gather only",
        f"{_SAFUSION} (inter- and intra-worker)",
        "adaptive-paper",
        collective="allgather",
    ),
    System(
        "saf-inter",
        "ahead of fusion; a fixed number of tensors per buffer, the same on all workers",
        f"{_SAFUSION} (inter-worker)",
        "aligned",
        collective="allgather",
    ),
    System(
        "saf-naive",
        "ahead of fusion; buffers of a fixed capacity that fill at each worker's own pace",
        f"{_SAFUSION} (naive)",
        "naive",
        compressor="gaussiank",
        collective="allgather",
    ),
    System(
        "fgbuff",
        "fuse, then select over the buffer; buffers by measured times",
        "FGBuff (predecessor of SAFusion), 2024",
        "adaptive",
        scope="group",
        collective="allgather",
    ),
    System(
        "behind",
        "fuse a fixed number of tensors, then select over the buffer: the traditional way",
        "sparsification behind fusion, as SAFusion calls it",
        "aligned",
        scope="group",
        collective="allgather",
    ),
    System(
        "wfbp",
        "no fusion: every tensor is sparsified and sent alone as soon as it is ready",
        "Poseidon, USENIX ATC 2017, with sparsification",
        "wfbp",
        collective="allgather",
    ),
)

#: All systems by name.
SYSTEMS = MappingProxyType({row.name: row for row in _ROWS})


def resolve_system(name: str) -> System:
    """The row called ``name``.

    Raises:
        ValueError: If there is none; the message lists the names.
    """
    if name not in SYSTEMS:
        close = difflib.get_close_matches(str(name), SYSTEMS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown system {name!r}; choose one of {', '.join(map(repr, SYSTEMS))}.{hint}")
    return SYSTEMS[name]
