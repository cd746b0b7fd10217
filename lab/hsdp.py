"""A model that is sharded inside of two machines and replicated between them, over a link of a given rate.

$ sudo python -m lab hsdp --bandwidth 100mbit      # Linux, root, iproute2
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lab.attack.workers import End, Job
from lab.bench.links import Machines, linked_namespaces, sent_bytes
from lightning_safusion import ConstantDensity, attach

_MACHINES, _SHARDS = 2, 2
_LIMIT_S = 1500.0
ROWS = ("floor", "hsdp", "hsdp-bf16", "saf-hsdp")


class Transformer(nn.Module):
    """An encoder over random tokens.

    Args:
        width: Of the layers.
        layers: How many.
    """

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(512, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.out = nn.Linear(width, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the tokens [B, T, 512]."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.out(x)
        return scores


def _made(row: str, mesh: DeviceMesh, density: float) -> tuple[Any, torch.optim.Optimizer]:
    """The model of a row, and its optimizer."""
    native = row.startswith("hsdp")
    options: dict[str, Any] = {"mesh": mesh if native else mesh["shard"]}
    if row == "hsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if row == "saf-hsdp":  # as later steps are: the first ones send more
        attach(model, optimizer, ConstantDensity(density), replicate_mesh=mesh["replicate"])
    return model, optimizer


def _steps(row: str, mesh: DeviceMesh, density: float, batch: int) -> Callable[[int], tuple[float, float]]:
    model, optimizer = _made(row, mesh, density)
    tokens = torch.randint(512, (batch, 64), generator=torch.Generator().manual_seed(dist.get_rank()))

    def run(number: int) -> tuple[float, float]:
        """Seconds, and bytes that this machine has sent, of each of so many steps."""
        dist.barrier()
        began, before = time.perf_counter(), sent_bytes() or 0
        for _ in range(number):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        dist.barrier()
        return (time.perf_counter() - began) / number, ((sent_bytes() or 0) - before) / number

    return run


def _work(rank: int, told: dict[str, Any], density: float, batch: int, rounds: int, block: int, warmup: int) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (_MACHINES, _SHARDS), mesh_dim_names=("replicate", "shard"))
    rows = {row: _steps(row, mesh, density, batch) for row in ROWS}
    rows["saf-hsdp"](warmup)  # plans are made meanwhile
    told["steps"] = {row: [] for row in ROWS}
    for number in range(rounds + 1):
        for row, run in rows.items():
            measured = run(block)
            if number:  # the first round meets the caches
                told["steps"][row].append(measured)
    dist.destroy_process_group()


def hsdp(
    bandwidth: str = "100mbit",
    density: float = 0.02,
    batch_size: int = 4,
    rounds: int = 6,
    block: int = 6,
    warmup: int = 60,
    output: Path = Path("hsdp"),
) -> None:
    """Measures FSDP2 inside of two machines of two workers each, with a dense and a sparse exchange between them.

    Rows: no exchange between machines; FSDP2's own, in fp32 and bf16; ours. They take turns. Needs Linux and root.

    Args:
        bandwidth: Of each machine's link.
        density: Share of the elements that is sent.
        batch_size: Sequences of one worker.
        rounds: Turns of each row.
        block: Steps of a turn.
        warmup: Steps of ours before the first turn.
        output: Folder for logs.

    Raises:
        RuntimeError: If links cannot be made here, or a worker fails.
    """
    torch.set_num_threads(1)  # no threads before workers are forked

    def work(rank: int, told: dict[str, Any]) -> None:
        _work(rank, told, density, batch_size, rounds, block, warmup)

    with linked_namespaces(_MACHINES, bandwidth) as made:
        place = Machines(_MACHINES * _SHARDS, tuple(machine for machine in made for _ in range(_SHARDS)))
        ends = Job(work, place.workers, output, place=place).run(_LIMIT_S)
    if bad := [end for end in ends if end.how != "finished"]:
        raise RuntimeError(f"rank {bad[0].rank} ended: {bad[0].how}: {bad[0].said}; its log is in {output}")
    elements = sum(param.numel() for param in Transformer().parameters())
    console = Console()
    console.print(f"{elements:,} parameters, two machines of two workers, links of {bandwidth} (emulated), CPU, gloo")
    console.print(table(ends))


def table(ends: list[End]) -> Table:
    """Median steps of all rows, beside the floor, and bytes that the first machine has sent."""
    made = Table(box=box.MARKDOWN)
    for heading in ("row", "ms per step", "over the floor", "faster than hsdp", "than hsdp-bf16", "kB sent per step"):
        made.add_column(heading, justify="left" if heading == "row" else "right")
    steps = {row: median(seconds for end in ends for seconds, _ in end.told["steps"][row]) for row in ROWS}
    for row in ROWS:
        sent = median(nbytes for _, nbytes in ends[0].told["steps"][row])
        beside = [f"{steps[row] / steps['floor']:.2f}", *(f"{steps[o] / steps[row]:.2f}" for o in ROWS[1:3])]
        made.add_row(row, f"{1e3 * steps[row]:.0f}", *beside, f"{sent / 1e3:,.0f}")
    return made
