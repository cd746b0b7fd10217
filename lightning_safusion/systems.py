"""The table of systems: every published scheme is one row of parts."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_safusion.ddp_hooks import DDPHookName
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.policy import FusionPolicy
from lightning_safusion.fusion.plans.registry import resolve_fusion
from lightning_safusion.fusion.quota import QuotaRule, Scope
from lightning_safusion.fusion.settings import CollectiveOption
from lightning_safusion.naming import look_up

#: The system of ``SAFusionStrategy()``: the best one at equal bytes.
DEFAULT = "saf-pooled"
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
        collective: ``"auto"``, ``"allgather"``, ``"hybrid"``, ``"hierarchical"``, ``"allreduce"``, ``"oktopk"`` or
            ``"gtopk"``.
        wire: Wire format.
        dense_below: Tensors of fewer elements travel dense.
        dense_below_ndim: Tensors of fewer dimensions travel dense.
        offload: Select from tensors on a thread of the host.
        own_buffers: Its dense buffers are the point: plain DDP never takes their place.
        ddp_hook: In place of the engine, DDP with this communication hook; the other parts mean nothing then.
        elastic: Workers train on their own, held together by a centre (Sync EASGD); replicas are not equal.
    """

    name: str
    summary: str
    source: str
    fusion: str
    compressor: str = "topk"
    scope: Scope = "tensor"
    quota: QuotaRule = "proportional"
    memory: str = "residual"
    collective: CollectiveOption = "auto"
    wire: str = "auto"
    dense_below: int = 0
    dense_below_ndim: int = 0
    offload: bool = False
    own_buffers: bool = False
    ddp_hook: DDPHookName | None = None
    elastic: bool = False

    @property
    def replicates(self) -> bool:
        """Whether all workers hold the same weights after every step."""
        return not self.elastic

    def policy(self) -> FusionPolicy:
        """The grouping policy with this row's options."""
        return Adaptive(rule="paper") if self.fusion == "adaptive-paper" else resolve_fusion(self.fusion)


_SAFUSION = "SAFusion, HPDC 2025"
_SSFUSION = "SSFusion, ICDE 2026"
_ROWS = (
    System(
        "safusion",
        "every tensor sparsified ahead of fusion; buffers by the exact programme over measured times",
        f"{_SAFUSION} (inter- and intra-worker), with small tensors dense and an exact planner",
        "adaptive",
        dense_below=_SMALL,
    ),
    System(
        "saf-pooled",
        "as safusion; a quarter of its share is sure for a tensor, the rest for the largest of a buffer; 4-bit values",
        "this package, after SAFusion; the default, for what it does to accuracy (docs/convergence.md)",
        "adaptive",
        quota="pooled",
        memory="auto",
        wire="q4",
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
    System(
        "wfbp-dense",
        "no fusion: every tensor is reduced alone as soon as it is ready, whole",
        "Poseidon, USENIX ATC 2017",
        "wfbp",
        compressor="none",
        memory="none",
        collective="allreduce",
        own_buffers=True,
    ),
    System(
        "mgwfbp",
        "a gradient waits for the next one where a message of its own would cost more than the wait, dense",
        "MG-WFBP, INFOCOM 2019 and TPDS 2021; costs measured in the job, and planned from once",
        "mgwfbp",
        compressor="none",
        memory="none",
        collective="allreduce",
        own_buffers=True,
    ),
    System(
        "omgs",
        "merge, then select over the buffer, where that delays less than the message it saves",
        "OMGS-SGD, INFOCOM 2020, with its planner, which the release has switched off; costs measured in the job",
        "omgs",
        scope="group",
        collective="allgather",
    ),
    System(
        "cupcake",
        "two buffers, selected from behind fusion; the cut is searched by trying it out on the running job",
        "MergeComp, 2021, and Cupcake, MLSys 2023; judged by times that all ranks agree on",
        "cupcake",
        scope="group",
        collective="allgather",
    ),
    System(
        "horovod",
        "every tensor sparsified ahead of fusion; whatever is ready on all workers at a tick of the clock is fused",
        "Horovod, 2018: 1 ms and 128 MiB, with sparsification",
        "horovod",
        collective="allgather",
    ),
    System(
        "horovod-dense",
        "whatever is ready on all workers at a tick of the clock is fused, whole",
        "Horovod, 2018: 1 ms and 128 MiB",
        "horovod",
        compressor="none",
        memory="none",
        collective="allreduce",
        own_buffers=True,
    ),
    System(
        "hipress",
        "every tensor alone: compressed where that is predicted to be faster; whole neighbours are batched",
        "HiPress, SOSP 2021: its comparison for collectives, without parts of a tensor; costs measured in the job",
        "hipress",
        own_buffers=True,
    ),
    System(
        "espresso",
        "every tensor alone: whole in 32 or 16 bits, or compressed, by simulating the iteration",
        "Espresso, EuroSys 2023, without its choice of device and of collectives in steps; times measured in the job",
        "espresso",
        own_buffers=True,
    ),
    System(
        "syncea",
        "one buffer for the whole model, selected from at the end of the backward pass",
        "the single-buffer baseline that FGBuff, SAFusion and SSFusion call SyncEA; no elastic averaging (see easgd)",
        "single",
        scope="group",
        collective="allgather",
    ),
    System(
        "oktopk",
        "one buffer; ranks add up regions of it, and keep the largest sums",
        "Ok-Topk, PPoPP 2022",
        "single",
        compressor="oktopk",
        scope="group",
        collective="oktopk",
    ),
    System(
        "gtopk",
        "one buffer; a tree adds selections pairwise and keeps the largest sums (loses mass from 3 workers on)",
        "gTop-k, ICDCS 2019",
        "single",
        scope="group",
        collective="gtopk",
    ),
    # Options, as the paper has them: interleaved (compressor=ADTopk(interleave=True)), with thresholds that are carried
    # from step to step (refresh=5), partial (fusion="selective": the same mechanism, which with one tensor per buffer,
    # as released, never leaves one whole) and hybrid (collective="hybrid": the release never launches that all-reduce).
    # Sparse messages are 6 bytes per element and not 12, and error feedback has no exceptions by name.
    System(
        "adtopk",
        "no fusion: every matrix sends the largest elements of each row, vectors travel whole",
        "ADTopk, HPDC 2024",
        "wfbp",
        compressor="adtopk",
        collective="allgather",
        dense_below_ndim=2,
    ),
    # All of SSFusion's published scripts train without error feedback, since they ignore that option; these rows have
    # it. Its buffers exceed the density, and its all-reduce is never launched: see Selective and HybridExchange.
    System(
        "ssfusion-naive",
        "ahead of fusion, 20 buffers; small tensors of a buffer travel whole, the others send as much less",
        f"{_SSFUSION} (selective sparsification)",
        "selective",
        collective="allgather",
    ),
    System(
        "ssfusion-o",
        "the same; a thread of the host selects from tensors while others are computed",
        f"{_SSFUSION} (selective sparsification, offloaded)",
        "selective",
        collective="allgather",
        offload=True,
    ),
    System(
        "ssfusion-i",
        "as ssfusion-naive; whole tensors travel by all-reduce, beside the selection and all-gather of the others",
        f"{_SSFUSION} (interleaved communication)",
        "selective",
        collective="hybrid",
    ),
    System(
        "ssfusion",
        "small tensors of a buffer whole and by all-reduce, the others less dense, selected on a thread of the host",
        _SSFUSION,
        "selective",
        collective="hybrid",
        offload=True,
    ),
    System(
        "dear",
        "dense buckets; their reduce-scatter behind the backward pass, their all-gather behind the next forward pass",
        "DeAR, ICDCS 2023; in DDP's buckets, with any optimizer of torch that treats parameters one by one",
        "single",
        ddp_hook="dear",
    ),
    System(
        "easgd",
        "workers train on their own weights, which a centre pulls together once per step",
        "Sync EASGD, SC 2017; the centre moves 0.9 of the way to the workers' mean",
        "single",
        ddp_hook="local",
        elastic=True,
    ),
    System("ddp", "plain DDP: dense buckets of 25 MiB", "PyTorch DDP, VLDB 2020", "single", ddp_hook="none"),
    System(
        "ddp-bf16",
        "plain DDP whose buckets travel as bfloat16: the honest dense baseline",
        "torch's bf16_compress_hook",
        "single",
        ddp_hook="bf16",
    ),
    System(
        "ddp-fp16",
        "plain DDP whose buckets travel as float16",
        "torch's fp16_compress_hook",
        "single",
        ddp_hook="fp16",
    ),
    System(
        "powersgd",
        "plain DDP with rank-1 approximations of the gradients, after ten dense steps",
        "PowerSGD, NeurIPS 2019; torch's powerSGD_hook",
        "single",
        ddp_hook="powersgd",
    ),
    System(
        "powersgd-rank4",
        "the same with rank-4 approximations",
        "PowerSGD, NeurIPS 2019; torch's powerSGD_hook",
        "single",
        ddp_hook="powersgd-rank4",
    ),
)

#: All systems by name.
SYSTEMS = MappingProxyType({row.name: row for row in _ROWS})


def resolve_system(name: str) -> System:
    """The row called ``name``.

    Raises:
        ValueError: If there is none; the message lists the names.
    """
    return look_up("system", name, SYSTEMS)


def print_systems() -> None:
    """Prints the systems that ``SAFusionStrategy(system=...)`` takes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    for heading in ("system", "what it decides", "source"):
        table.add_column(heading, overflow="fold")
    for row in SYSTEMS.values():
        table.add_row(f"[bold]{row.name}[/bold]", row.summary, row.source)
    Console().print(table)
