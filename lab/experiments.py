"""The experiments of the papers' slides on the simulator, beside what the slides claim.

    $ python -m lab experiments                       # all of them
    $ python -m lab experiments --only ablation --bandwidth 10gbit

Everything is simulated: shipped traces (modelled times), links by their rate, every system as the papers describe it
(8 bytes per entry, selection in one call per tensor), workers whose times differ by a jitter. "papers" is SAFusion with
the papers' buffer rule; "here" is this package's ``safusion`` (exact buffer sizes, small tensors dense, 6 bytes per
entry, one selection call per buffer). All are charged the times of selection and decoding that were published for GPUs:
what this package's own kernels and operations cost a device is counted in ``safusion plan``. DDP in bf16, which the
slides leave out, stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.lookup import look_up
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.schedule import Iteration
from lightning_safusion.tools.plan.systems import run_system
from lightning_safusion.tools.plan.traces import resolve_trace

# A published comparison of planners: an exact selection, a sampled threshold, and the decoding of an entry.
_TIMES = {"exact": SelectionCost(40e-6, 0.10e-9), "threshold": SelectionCost(25e-6, 0.012e-9)}
#: GPUs by the kind of selection, in place of counted work.
PUBLISHED = {
    kind: replace(DEVICES["a100"], selection=cost, decode=0.06e-9, published=True) for kind, cost in _TIMES.items()
}
_RIVALS = ("wfbp", "oktopk", "omgs", "cupcake")
_HEAD = f"| over {' | over '.join(_RIVALS)} | papers over bf16 DDP | here over bf16 DDP |"
_RULE = "| ---: " * (len(_RIVALS) + 2) + "|"
# Seconds relative to a sampled threshold (DGC), as `python -m lab selection` measures them on a CPU.
_SPARSIFIERS = {"dgc": 1.0, "gaussiank": 1.5, "redsync": 2.7, "sidco": 4.1}


@dataclass(frozen=True)
class Settings:
    """Settings of all experiments.

    Args:
        bandwidth: Of a node's network card.
        nodes: Nodes of one GPU.
        jitter: Between workers, relative standard deviation.
    """

    bandwidth: str = "100gbit"
    nodes: int = 8
    jitter: float = 0.1

    def job(self, trace: str, density: float = 0.01, cluster: Cluster | None = None) -> Job:
        """A job of the papers on their local cluster, or on another."""
        cluster = cluster or Cluster(self.nodes, 1, resolve_link(self.bandwidth), jitter=self.jitter)
        cluster = replace(cluster, device=PUBLISHED["threshold"])
        return Job(resolve_trace(trace), cluster, density, 8.0, segmented=False)


def ours(job: Job) -> Iteration:
    """This package's SAFusion on the same job."""
    return run_system("safusion", replace(job, entry_bytes=6.0, segmented=True))


def compared(job: Job) -> str:
    """Cells of one row: the papers' SAFusion over its rivals, and over DDP in bf16."""
    papers, dense = run_system("safusion-paper", job).seconds, run_system("ddp-bf16", job).seconds
    rivals = " | ".join(f"{run_system(name, job).seconds / papers - 1:+.0%}" for name in _RIVALS)
    return f"{rivals} | {dense / papers - 1:+.0%} | {dense / ours(job).seconds - 1:+.0%} |"


def throughput(settings: Settings) -> None:
    """Experiment 2: throughput by cluster size."""
    _title("Throughput by cluster size", "+18 to +104 % over others (vision), +20 to +144 % (language); 200 Gbit/s")
    print(f"| trace | GPUs {_HEAD}\n| --- | ---: {_RULE}")
    for trace in ("resnet-152", "vit-large", "gpt2-large", "bert-large"):
        for nodes in (4, 8, 16):
            cluster = Cluster(nodes, 4, resolve_link("200gbit"), jitter=settings.jitter)
            print(f"| {trace} | {cluster.workers} | {compared(settings.job(trace, cluster=cluster))}", flush=True)


def ablation(settings: Settings) -> None:
    """Experiment 3: alignment, then adaptive sizes."""
    claims = {
        "resnet-152": (12.4, 34.7),
        "vit-large": (18.2, 46.4),
        "gpt2-large": (30.8, 35.3),
        "bert-large": (16.8, 37.7),
    }
    _title(f"Ablation, {settings.bandwidth}", "gains up to the figures in the columns")
    print("| trace | inter over naive | claimed | papers' rule over inter | claimed | here over inter |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for trace, (first, second) in claims.items():
        job = settings.job(trace)
        naive, inter, papers = (run_system(name, job).seconds for name in ("saf-naive", "saf-inter", "safusion-paper"))
        here = inter / ours(job).seconds - 1
        cells = f"{naive / inter - 1:+.1%} | +{first} % | {inter / papers - 1:+.1%} | +{second} % | {here:+.1%}"
        print(f"| {trace} | {cells} |", flush=True)


def breakdown(settings: Settings) -> None:
    """Experiment 4: exposed communication (NOCT) and selection."""
    claim = (
        "NOCT of WFBP 132 to 160 % above SAFusion's, of others 20 to 107 %; selection 4.5 to 6.2 % above OMGS, Cupcake"
    )
    _title(f"Time breakdown, {settings.bandwidth}", claim)
    print("| trace | system | step, ms | selection, ms | NOCT, ms | NOCT over papers' SAFusion |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for trace in ("resnet-152", "bert-large"):
        job = settings.job(trace)
        papers = run_system("safusion-paper", job)
        rows = {name: run_system(name, job) for name in _RIVALS} | {"papers": papers, "here": ours(job)}
        for name, run in rows.items():
            noct, base = run.exposed - run.select, papers.exposed - papers.select
            times = f"{run.seconds * 1e3:.1f} | {run.select * 1e3:.1f} | {noct * 1e3:.1f}"
            print(f"| {trace} | {name} | {times} | {noct / base - 1:+.0%} |", flush=True)


def sparsifiers(settings: Settings) -> None:
    """Experiment 5: other sparsifiers, which differ by the cost of selection."""
    _title(f"Sparsifiers, {settings.bandwidth}", "+14 to +77 % (ResNet-152), +10.2 to +90.6 % (BERT-large)")
    print(f"| trace | sparsifier {_HEAD}\n| --- | --- {_RULE}")
    base = _TIMES["threshold"]
    for trace in ("resnet-152", "bert-large"):
        for name, factor in _SPARSIFIERS.items():
            cost = SelectionCost(base.fixed * factor, base.per_element * factor)
            job = settings.job(trace)
            device = replace(PUBLISHED["threshold"], selection=cost)
            job = replace(job, cluster=replace(job.cluster, device=device))
            print(f"| {trace} | {name} | {compared(job)}", flush=True)


def densities(settings: Settings) -> None:
    """Experiment 6: densities."""
    claims = {0.1: "+27.7 to +78.6 %", 0.05: "+26.2 to +83.1 %", 0.01: "+14.2 to +77.2 %"}
    _title(f"Densities, {settings.bandwidth}", "see the column")
    print(f"| trace | density | claimed {_HEAD}\n| --- | ---: | --- {_RULE}")
    for trace in ("resnet-152", "bert-large"):
        for density, claim in claims.items():
            print(f"| {trace} | {density:g} | {claim} | {compared(settings.job(trace, density))}", flush=True)


def bandwidths(settings: Settings) -> None:
    """Experiment 7: bandwidths."""
    claim = (
        "+12.1 to +85.9 %, +9.2 to +75.3 %, +11.2 to +77.2 % on three networks, which the slides' text does not name"
    )
    _title("Bandwidths", claim)
    print(f"| trace | bandwidth {_HEAD}\n| --- | --- {_RULE}")
    for trace in ("resnet-152", "bert-large"):
        for rate in ("1gbit", "10gbit", "25gbit", "100gbit"):
            print(f"| {trace} | {rate} | {compared(replace(settings, bandwidth=rate).job(trace))}", flush=True)


def _title(what: str, claim: str) -> None:
    print(f"\n### {what} (simulated)\n\nClaimed: {claim}.\n")


EXPERIMENTS: dict[str, Callable[[Settings], None]] = {
    "throughput": throughput,
    "ablation": ablation,
    "breakdown": breakdown,
    "sparsifiers": sparsifiers,
    "densities": densities,
    "bandwidths": bandwidths,
}


def experiments(
    only: Sequence[str] = tuple(EXPERIMENTS),
    bandwidth: str = Settings.bandwidth,
    nodes: int = Settings.nodes,
    jitter: float = Settings.jitter,
) -> None:
    """The experiments of the papers' slides on the simulator, beside what the slides claim: tables in markdown.

    Args:
        only: These: "throughput", "ablation", "breakdown", "sparsifiers", "densities", "bandwidths".
        bandwidth: Of a node's network card.
        nodes: Nodes of one GPU.
        jitter: Between workers, relative standard deviation.
    """
    chosen = [look_up("experiment", name, EXPERIMENTS) for name in only]
    for experiment in chosen:
        experiment(Settings(bandwidth, nodes, jitter))
