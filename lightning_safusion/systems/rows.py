"""The table of systems: every published scheme is one row, with parts for the engine, or DDP with another hook."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from lightning_safusion.lookup import DDPHookName, QuotaRule, Scope, SelectBy
from lightning_safusion.registry import Registry

if TYPE_CHECKING:  # the table is read where there is no torch
    from lightning_safusion.fusion.plans.policy import FusionPolicy


@dataclass(frozen=True)
class System:
    """The description of a system.

    Args:
        name: As in ``SAFusionStrategy(system=name)``.
        summary: Its decisions, in one line.
        source: Where it was published.
    """

    name: str
    summary: str
    source: str


@dataclass(frozen=True)
class EngineSystem(System):
    """Parts of the engine by name, as in :class:`~lightning_safusion.fusion.settings.EngineSettings`.

    An argument of the strategy replaces the part of its name.

    Args:
        dense_below: Tensors of fewer elements are dense.
        dense_below_ndim: Tensors of fewer dimensions are dense.
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
    select_by: SelectBy = "gradient"
    own_buffers: bool = False

    #: No hook: the engine exchanges the gradients.
    ddp_hook: ClassVar[None] = None

    def policy(self) -> FusionPolicy:
        """The grouping policy with this row's options."""
        from lightning_safusion.fusion.plans.adaptive import Adaptive
        from lightning_safusion.fusion.plans.registry import resolve_fusion

        return Adaptive(rule="paper") if self.fusion == "adaptive-paper" else resolve_fusion(self.fusion)

    @property
    def sparse(self) -> bool:
        """Whether it sends less than all of every gradient."""
        return self.compressor != "none"


@dataclass(frozen=True)
class HookSystem(System):
    """DDP with another communication hook; it has none of the engine's parts.

    Args:
        ddp_hook: The hook.
    """

    ddp_hook: DDPHookName

    #: All of every gradient is exchanged, or an approximation of it whose error stays with the hook.
    sparse: ClassVar[bool] = False


#: The system of ``SAFusionStrategy()``: the best one at equal bytes.
DEFAULT = "saf-pooled"
#: Tensors below this size (norms, biases) are a small share of the bytes; dense ones are never stale.
SMALL = 512

# Three families: sparse messages, of elements selected before or after fusion, or every gradient whole.
_before_fusion = partial(EngineSystem, collective="allgather")
_after_fusion = partial(EngineSystem, collective="allgather", scope="group")
_dense = partial(EngineSystem, collective="allreduce", compressor="none", memory="none", own_buffers=True)
_SAFUSION = "SAFusion, HPDC 2025"
_SSFUSION = "SSFusion, ICDE 2026"
_ROWS: tuple[EngineSystem | HookSystem, ...] = (
    EngineSystem(
        "safusion",
        "every tensor sparsified before fusion; buffers by the exact programme over measured times",
        f"{_SAFUSION} (inter- and intra-worker), with small tensors dense and an exact planner",
        "adaptive",
        dense_below=SMALL,
    ),
    EngineSystem(
        "saf-pooled",
        "as safusion, with 4-bit values; elements by how far Adam moves them, or shared quotas below other optimizers",
        "this package, after SAFusion; the default, for what it does to accuracy (docs/convergence.md)",
        "adaptive",
        quota="auto",
        memory="auto",
        wire="q4",
        select_by="auto",
    ),
    _before_fusion(
        "safusion-paper",
        "as safusion, with the paper's greedy buffer rule, no dense tensors, all-gather only",
        f"{_SAFUSION} (inter- and intra-worker)",
        "adaptive-paper",
    ),
    _before_fusion(
        "saf-inter",
        "before fusion; a fixed number of tensors per buffer, the same on all workers",
        f"{_SAFUSION} (inter-worker)",
        "aligned",
    ),
    _before_fusion(
        "saf-naive",
        "before fusion; buffers of a fixed capacity that fill at each worker's own pace",
        f"{_SAFUSION} (naive)",
        "naive",
        compressor="gaussiank",
    ),
    _after_fusion(
        "fgbuff",
        "fuse, then select over the buffer; buffers by measured times",
        "FGBuff (predecessor of SAFusion), 2024",
        "adaptive",
    ),
    _after_fusion(
        "behind",
        "fuse a fixed number of tensors, then select over the buffer: the traditional way",
        "sparsification after fusion, as SAFusion calls it",
        "aligned",
    ),
    _before_fusion(
        "wfbp",
        "no fusion: every tensor is sparsified and sent alone as soon as it is ready",
        "Poseidon, USENIX ATC 2017, with sparsification",
        "wfbp",
    ),
    _dense(
        "wfbp-dense",
        "no fusion: every tensor is reduced alone as soon as it is ready, dense",
        "Poseidon, USENIX ATC 2017",
        "wfbp",
    ),
    _dense(
        "mgwfbp",
        "a gradient waits for the next one where a message of its own would cost more than the wait, dense",
        "MG-WFBP, INFOCOM 2019 and TPDS 2021; costs measured in the job, and planned from once",
        "mgwfbp",
    ),
    _after_fusion(
        "omgs",
        "merge, then select over the buffer, where that delays less than the message it saves",
        "OMGS-SGD, INFOCOM 2020, with its planner, which the release has switched off; costs measured in the job",
        "omgs",
    ),
    _after_fusion(
        "cupcake",
        "two buffers, selected from after fusion; the cut is searched by trying it out on the running job",
        "MergeComp, 2021, and Cupcake, MLSys 2023; judged by times that all ranks agree on",
        "cupcake",
    ),
    _before_fusion(
        "horovod",
        "every tensor sparsified before fusion; whatever is ready on all workers at a tick of the clock is fused",
        "Horovod, 2018: 1 ms and 128 MiB, with sparsification",
        "horovod",
    ),
    _dense(
        "horovod-dense",
        "whatever is ready on all workers at a tick of the clock is fused, dense",
        "Horovod, 2018: 1 ms and 128 MiB",
        "horovod",
    ),
    EngineSystem(
        "hipress",
        "every tensor alone: compressed where that is predicted to be faster; dense neighbours are batched",
        "HiPress, SOSP 2021: its comparison for collectives, without parts of a tensor; costs measured in the job",
        "hipress",
        own_buffers=True,
    ),
    EngineSystem(
        "espresso",
        "every tensor alone: dense in 32 or 16 bits, or compressed, by simulating the iteration",
        "Espresso, EuroSys 2023, without its choice of device and of collectives in steps; times measured in the job",
        "espresso",
        own_buffers=True,
    ),
    _after_fusion(
        "syncea",
        "one buffer for the whole model, selected from at the end of the backward pass",
        "the single-buffer baseline that FGBuff, SAFusion and SSFusion call SyncEA; no elastic averaging (see easgd)",
        "single",
    ),
    EngineSystem(
        "oktopk",
        "one buffer; ranks add up regions of it, and keep the largest sums",
        "Ok-Topk, PPoPP 2022",
        "single",
        compressor="oktopk",
        scope="group",
        collective="oktopk",
    ),
    EngineSystem(
        "gtopk",
        "one buffer; a tree adds selections pairwise and keeps the largest sums (loses mass from 3 workers on)",
        "gTop-k, ICDCS 2019",
        "single",
        scope="group",
        collective="gtopk",
    ),
    # Options, as the paper has them: interleaved (compressor=ADTopk(interleave=True)), with thresholds that are carried
    # from step to step (refresh=5), partial (fusion="selective": the same mechanism, which with one tensor per buffer,
    # as released, never leaves one dense) and hybrid (collective="hybrid": the release never launches that all-reduce).
    # Sparse messages are 6 bytes per element and not 12, and error feedback has no exceptions by name.
    _before_fusion(
        "adtopk",
        "no fusion: every matrix sends the largest elements of each row, vectors are dense",
        "ADTopk, HPDC 2024",
        "wfbp",
        compressor="adtopk",
        dense_below_ndim=2,
    ),
    # All of SSFusion's published scripts train without error feedback, since they ignore that option; these rows have
    # it. Its buffers exceed the density, and its all-reduce is never launched: see Selective and HybridExchange.
    _before_fusion(
        "ssfusion-naive",
        "before fusion, 20 buffers; small tensors of a buffer are dense, the others send as much less",
        f"{_SSFUSION} (selective sparsification)",
        "selective",
    ),
    _before_fusion(
        "ssfusion-o",
        "the same; a thread of the host selects from tensors while others are computed",
        f"{_SSFUSION} (selective sparsification, offloaded)",
        "selective",
        offload=True,
    ),
    EngineSystem(
        "ssfusion-i",
        "as ssfusion-naive; dense tensors by all-reduce, beside the selection and all-gather of the others",
        f"{_SSFUSION} (interleaved communication)",
        "selective",
        collective="hybrid",
    ),
    EngineSystem(
        "ssfusion",
        "small tensors of a buffer dense and by all-reduce, the others less dense, selected on a thread of the host",
        _SSFUSION,
        "selective",
        collective="hybrid",
        offload=True,
    ),
    HookSystem(
        "dear",
        "dense buckets; reduce-scatter during the backward pass, all-gather during the next forward pass",
        "DeAR, ICDCS 2023; in DDP's buckets, with any optimizer of torch that treats parameters one by one",
        "dear",
    ),
    HookSystem(
        "easgd",
        "workers train on their own weights, which a centre pulls together once per step",
        "Sync EASGD, SC 2017; the centre moves 0.9 of the way to the workers' mean",
        "local",
    ),
    HookSystem("ddp", "plain DDP: dense buckets of 25 MiB", "PyTorch DDP, VLDB 2020", "none"),
    HookSystem(
        "ddp-bf16",
        "plain DDP with buckets in bfloat16: the dense baseline of comparisons",
        "torch's bf16_compress_hook",
        "bf16",
    ),
    HookSystem("ddp-fp16", "plain DDP with buckets in float16", "torch's fp16_compress_hook", "fp16"),
    HookSystem(
        "powersgd",
        "plain DDP with rank-1 approximations of the gradients, after ten dense steps",
        "PowerSGD, NeurIPS 2019; torch's powerSGD_hook",
        "powersgd",
    ),
    HookSystem(
        "powersgd-rank4",
        "the same with rank-4 approximations",
        "PowerSGD, NeurIPS 2019; torch's powerSGD_hook",
        "powersgd-rank4",
    ),
)

#: All systems by name.
SYSTEMS: dict[str, EngineSystem | HookSystem] = {row.name: row for row in _ROWS}
REGISTRY: Registry[EngineSystem | HookSystem] = Registry("system", EngineSystem | HookSystem, SYSTEMS, "systems")


def resolve_system(name: str) -> EngineSystem | HookSystem:
    """The row called ``name``: of :data:`SYSTEMS`, or what an installed package adds under this name.

    Errors are those of :meth:`Registry.resolve`.
    """
    row = REGISTRY.resolve(name)
    return row if row.name == name else replace(row, name=name)


#: Names of systems where a model is sharded inside of replicas (HSDP), and the exchange is between these.
SHARDED_ROWS: Mapping[str, str] = MappingProxyType({"hsdp": "ddp", "hsdp-bf16": "ddp-bf16", "saf-hsdp": DEFAULT})


def sharded_names(text: str) -> str:
    """A text about rows, with the names that they have where a model is sharded inside of replicas (HSDP)."""
    for sharded, plain in SHARDED_ROWS.items():
        text = re.sub(rf"\b(?<!-){plain}\b(?!-)", sharded, text)
    return re.sub(r"\bDDP\b", "HSDP", text)
