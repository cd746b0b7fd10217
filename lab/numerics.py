"""Hashes of the parameters after some steps, for every system: what a change of the code must leave as it is.

    $ python -m lab numerics --output before.json
    $ python -m lab numerics --output after.json --compare before.json

Training is deterministic, so that plans come from modelled costs. Each worker count is one team of processes, which
train one case after the other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lab.processes import run_workers
from lightning_safusion.systems import SYSTEMS
from lightning_safusion.tools.bench.rows import Row, parse_row
from lightning_safusion.tools.team import Place, make_trainer

_BATCH = 8


class Network(LightningModule):
    """Tensors of 1 to 24,576 elements: an embedding, a convolution, a norm, layers and a scalar.

    Args:
        optimizer: ``"sgd"`` (with momentum) or ``"adamw"``.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.optimizer = optimizer
        self.embedding = nn.Embedding(64, 32)
        self.convolution = nn.Conv1d(32, 48, 3, padding=1)
        self.norm = nn.LayerNorm(48)
        self.body = nn.Sequential(nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.temperature = nn.Parameter(torch.ones(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.convolution(self.embedding(batch[0]).transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.body(self.norm(x).flatten(1)) * self.temperature, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 2e-3)


def _trained(row: Row, optimizer: str, precision: Any, workers: int, steps: int, rank: int) -> str:
    """24 hexadecimal digits of the parameters, or the error that training ended with."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randint(0, 64, (steps * _BATCH * workers, 8), generator=generator)
    y = (x.float().mean(1) / 6.4).long().clamp(0, 9)
    module = Network(optimizer)
    try:
        trainer = make_trainer(workers, row.strategy(0.1), [], max_steps=steps, deterministic=True, precision=precision)
        data = TensorDataset(x, y)
        trainer.fit(module, DataLoader(data, _BATCH, sampler=DistributedSampler(data, workers, rank)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    digest = hashlib.sha256()
    for _, value in sorted(module.state_dict().items()):
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]


def _work(cases: Sequence[tuple[Row, str, str]], workers: int, steps: int, rank: int, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for row, optimizer, precision in cases:
        name = f"{row.name}/{optimizer}/{precision}/{workers}"
        pipe.send((name, _trained(row, optimizer, precision, workers, steps, rank)))


def numerics(
    output: Path = Path("numerics.json"),
    systems: Sequence[str] = (),
    workers: Sequence[int] = (2, 3),
    steps: int = 30,
    compare: Path | None = None,
) -> None:
    """Trains every system and writes hashes of the parameters.

    Args:
        output: JSON file of the hashes, by ``system/optimizer/precision/workers``.
        systems: Rows, with options as in ``safusion bench``; all systems by default.
        workers: Numbers of workers.
        steps: Steps of each training.
        compare: A file that this command has written: what differs is listed.

    Raises:
        SystemExit: If ranks end with different parameters, or something differs from the other file.
    """
    rows = [parse_row(name) for name in systems or SYSTEMS]
    cases = list(product(rows, ("sgd", "adamw"), ("32-true", "bf16-mixed")))
    found: dict[str, set[str]] = {}
    for count in workers:
        for name, digest in run_workers(Place(count), partial(_work, cases, count, steps)):
            found.setdefault(name, set()).add(digest)
    apart = [name for name, digests in found.items() if len(digests) > 1]
    hashes = {name: min(digests) for name, digests in found.items()}
    output.write_text(json.dumps(hashes, indent=1) + "\n")
    print(f"{len(hashes)} trainings, written to {output}")
    before = json.loads(compare.read_text()) if compare is not None else {}
    changed = [name for name, digest in hashes.items() if before.get(name, digest) != digest]
    if apart or changed:
        raise SystemExit(f"ranks differ: {apart}; changed since {compare}: {changed}")
