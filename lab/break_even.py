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
from functools import cache
from math import inf
from pathlib import Path

from lab.markdown import markdown
from lightning_safusion.comm.catalogue import BYTES_ALONE, shards_pay
from lightning_safusion.comm.collectives.sharded import ShardedExchange
from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.sparsify.schedule import SuitedDensity
from lightning_safusion.systems import DEFAULT
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.comparison import break_even
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.job import Job
from lightning_safusion.tools.plan.traces import resolve_trace

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
_BLOCK = re.compile(r"(<!-- (bytes|densities|bandwidths|safusion plan [^\n]*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def break_even_tables(document: str | None = None) -> None:
    """From which number of bytes and from which bandwidth on DDP is as good as the default.

    Args:
        document: Markdown file whose tables and outputs are written anew, in place of printing: docs/will_it_help.md.

    Raises:
        ValueError: If it marks no place for them.
    """
    if document is None:
        print("\n\n".join(make() for make in TABLES.values()))
        return
    path = Path(document)
    path.write_text(documented(path.read_text(encoding="utf-8")), encoding="utf-8")


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
    cells = []
    for trace, density in JOBS.values():
        job = Job(resolve_trace(trace), Cluster(nodes, gpus, device=DEVICES["a100"]), density)
        cells += [_shown(break_even(job, DEFAULT, baseline)) for baseline in BASELINES]
    return tuple(cells)


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
