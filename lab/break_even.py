"""From where on compression stops paying: the tables of ``docs/will_it_help.md``, and the output of its commands.

    $ python -m lab break-even
    $ python -m lab break-even --document docs/will_it_help.md

Bytes are arithmetic. Bandwidths are simulated: shipped traces, a GPU by its maker's specification, counted work.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from lab.markdown import markdown
from lab.svg import BF16, DDP, DEFAULT, chart
from lightning_safusion.comm.catalogue import BYTES_ALONE, shards_pay
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.sparsify.schedule import SuitedDensity
from lightning_safusion.systems import DEFAULT as SYSTEM
from lightning_safusion.tools.plan.cluster import Cluster, resolve_link
from lightning_safusion.tools.plan.comparison import break_even
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.systems import run_system
from lightning_safusion.tools.plan.traces import resolve_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Elements of the gradient whose messages are computed.
ELEMENTS = 2**22
WORKERS = (2, 4, 8, 16, 32, 64)
GATHERING = (2, 4, 8, 16, 32, 64, 128)
#: Values that are gathered, and the dense exchange beside them: bytes of an element.
GATHERED = (
    ("32 bits", "fp32", "DDP", 4),
    ("16 bits", "bf16", "DDP", 4),
    ("16 bits", "bf16", "DDP in bf16", 2),
    ("4 bits", "q4", "DDP in bf16", 2),
)
#: Nodes, and GPUs in each.
CLUSTERS = ((2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (2, 8), (4, 8), (8, 8))
#: Trace, and the density that the strategy takes with its usual optimizer.
JOBS = {"ResNet-50": ("resnet-50", SuitedDensity.PLAIN), "BERT-large": ("bert-large", SuitedDensity.WITH_MOMENTUM)}
BASELINES = {"ddp": "DDP", "ddp-bf16": "DDP in bf16"}
#: What the picture shows: a job, nodes, GPUs in each, and what these are called.
PICTURED = (
    ("ResNet-50", 2, 1, "ResNet-50, SGD at 10 %, 2 x 1 GPUs"),
    ("BERT-large", 4, 8, "BERT-large, AdamW at 2 %, 4 x 8 GPUs"),
)
#: Gbit/s of a node's card in the picture.
RATES = tuple(10 ** (tenth / 10) for tenth in range(27))
_BLOCK = re.compile(r"(<!-- (bytes|densities|bandwidths|safusion plan [^\n]*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def break_even_tables(document: str | None = None) -> None:
    """From which number of bytes and from which bandwidth on DDP is as good as the default.

    Args:
        document: Markdown file whose tables and outputs are written anew, in place of printing: docs/will_it_help.md.
            The picture is images/break_even.svg beside it.

    Raises:
        ValueError: If it marks no place for them.
        ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
    """
    if document is None:
        print("\n\n".join(make() for make in TABLES.values()))
        return
    path = Path(document)
    path.write_text(documented(path.read_text(encoding="utf-8")), encoding="utf-8")
    picture(path.parent / "images" / "break_even.svg")


def documented(text: str) -> str:
    """The document with what stands between a mark (a name of :data:`TABLES`, or a ``safusion plan`` command, as in
    ``<!-- bytes -->``) and ``<!-- end -->`` made anew.

    Raises:
        ValueError: If there is no such mark.
    """

    def made(match: re.Match[str]) -> str:
        content = TABLES[match[2]]() if match[2] in TABLES else planned(match[2])
        return f"{match[1]}\n{content}\n\n"

    text, found = _BLOCK.subn(made, text)
    if not found:
        raise ValueError("the document has no mark such as '<!-- bytes -->' before an '<!-- end -->'")
    return text


def bytes_table() -> str:
    """Bytes per parameter that a worker receives in a step."""
    heads = ["workers", "DDP", "DDP in bf16", "default at 2 %", "default at 5 %", "default at 10 %"]
    rows = []
    for workers in WORKERS:
        dense = [ring_allreduce_bytes(workers, width) for width in (4, 2)]
        sparse = [received(workers, round(ELEMENTS * share)) / ELEMENTS for share in (0.02, 0.05, 0.1)]
        rows.append([workers, *(f"{nbytes:.2f}" for nbytes in (*dense, *sparse))])
    return markdown(heads, rows)


def received(workers: int, entries: int) -> float:
    """Bytes that a worker of the default receives, of :data:`ELEMENTS` elements with so many entries.

    On a link where bytes alone take time.
    """
    message = message_bytes("q4", ELEMENTS, entries)
    if not shards_pay(workers, BYTES_ALONE, message):
        return allgather_bytes(workers, message)
    return Cluster(workers).sharded(ShardedExchange.scattered * message, ShardedExchange.gathered * message).nbytes


def densities_table() -> str:
    """Densities at which an all-gather brings a worker as much as DDP does."""
    heads = ["workers", *(f"{values} against {dense}" for values, _, dense, _ in GATHERED)]
    limits = [[density_of(n, wire, width) for _, wire, _, width in GATHERED] for n in GATHERING]
    return markdown(heads, [[n, *(f"{100 * x:.1f} %" for x in row)] for n, row in zip(GATHERING, limits, strict=True)])


def density_of(workers: int, wire: str, width: int) -> float:
    """Greatest density at which an all-gather brings a worker no more than an all-reduce.

    Args:
        workers: Number of them.
        wire: Values that are sent.
        width: Bytes of an element in the all-reduce.
    """
    dense, low, high = ring_allreduce_bytes(workers, width * ELEMENTS), 1, ELEMENTS
    while low < high:
        middle = (low + high + 1) // 2
        cheaper = allgather_bytes(workers, message_bytes(wire, ELEMENTS, middle)) <= dense
        low, high = (middle, high) if cheaper else (low, middle - 1)
    return low / ELEMENTS


def bandwidths_table() -> str:
    """Gbit/s of a node's card from which the default is no faster than DDP."""
    heads = ["nodes x GPUs", *(f"{name} against {dense}" for name in JOBS for dense in BASELINES.values())]
    rows = [[f"{nodes} x {gpus}", *bandwidths(nodes, gpus)] for nodes, gpus in CLUSTERS]
    return markdown(heads, rows)


@cache
def bandwidths(nodes: int, gpus: int) -> tuple[str, ...]:
    """A row of :func:`bandwidths_table`: the cells of each of :data:`JOBS` over each of :data:`BASELINES`."""
    jobs = [_job(name, nodes, gpus) for name in JOBS]
    return tuple(_shown(break_even(job, SYSTEM, baseline)) for job in jobs for baseline in BASELINES)


def _job(name: str, nodes: int, gpus: int) -> Job:
    trace, density = JOBS[name]
    return Job(resolve_trace(trace), Cluster(nodes, gpus, device=DEVICES["a100"]), density)


def picture(path: Path) -> None:
    """Draws how many times as fast as DDP the default and DDP in bf16 are, over the bandwidth of a node's card."""
    jobs = {called: _job(name, nodes, gpus) for name, nodes, gpus, called in PICTURED}
    ends = [break_even(job, SYSTEM, "ddp-bf16") for job in jobs.values()]
    about = [f"{called}: up to {_shown(end)} Gbit/s" for called, end in zip(jobs, ends, strict=True)]
    title = "The default against DDP and DDP in bf16, by bandwidth"
    with chart(path, (5.2, 5.6), title, f"The default is ahead. {'; '.join(about)}. Simulated.") as figure:
        for axes, (called, job), end in zip(figure.subplots(2, 1), jobs.items(), ends, strict=True):
            _draw(axes, job, end)
            axes.set_title(called)
        figure.supxlabel("Gbit/s of a node's network card")
        figure.supylabel("times as fast as DDP")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3)


def _draw(axes: Axes, job: Job, end: float) -> None:
    """The curves of a job, and up to how many Gbit/s the default is ahead."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    there = [replace(job, cluster=replace(job.cluster, inter=resolve_link(f"{rate:g}gbit"))) for rate in RATES]
    seconds = {system: [run_system(system, each).seconds for each in there] for system in (*BASELINES, SYSTEM)}
    for (system, times), color in zip(seconds.items(), (DDP, BF16, DEFAULT), strict=True):
        faster = [dense / own for dense, own in zip(seconds["ddp"], times, strict=True)]
        label = BASELINES.get(system, "SAFusion, default")
        axes.plot(RATES, faster, color=color, linewidth=2.5, label=label)
    axes.axvline(end, color=DDP, linestyle=":")
    note, place = f"{_shown(end)} Gbit/s:\nfrom here on\nDDP in bf16", ("data", "axes fraction")
    axes.annotate(note, (end, 0.98), (6, 0), xycoords=place, textcoords="offset points", va="top")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, ticks in ((axes.xaxis, (1, 3, 10, 30, 100, 300)), (axes.yaxis, (1, 2, 5, 10, 20, 50))):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _shown(rate: float) -> str:
    if rate in (0, inf):
        return "never pays" if rate == 0 else "always pays"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def planned(command: str) -> str:
    """A command of ``safusion`` as a block, and what it prints on 96 columns as another one."""
    ended = subprocess.run(
        [sys.executable, "-m", "safusion_command", *shlex.split(command)[1:]],
        env=os.environ | {"COLUMNS": "96"},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = "\n".join(line.rstrip() for line in ended.stdout.splitlines()).rstrip()
    return f"```bash\n{command}\n```\n\n```text\n{printed}\n```"


#: What a mark of the document stands for.
TABLES: Mapping[str, Callable[[], str]] = {
    "bytes": bytes_table,
    "densities": densities_table,
    "bandwidths": bandwidths_table,
}
