"""The papers' workloads at full size on the workers of a launcher, or tiny on two workers of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from examples.workloads.cli import CONFIGS
from examples.workloads.make_tiny_data import FOLDER, make_all

#: Workers of tiny workloads.
WORKERS = 2
# A node each: so every worker can have a network of its own.
_TWO_NODES = f"trainer:\n  devices: 1\n  num_nodes: {WORKERS}\n"


def prepare(tiny: bool, logs: Path) -> None:
    """Makes the folder, and what tiny workloads read.

    Raises:
        ValueError: If no launcher has started this process, and workloads are not tiny.
    """
    if not tiny and "LOCAL_RANK" not in os.environ and not SLURMEnvironment.detect():
        raise ValueError(
            "the workloads train at full size on the workers of a launcher: start the command with srun or torchrun, "
            "or give --tiny"
        )
    logs.mkdir(parents=True, exist_ok=True)
    if tiny:
        (logs / "workers.yaml").write_text(_TWO_NODES, encoding="utf-8")
        if not FOLDER.exists():
            make_all()


def is_first() -> bool:
    """Whether this process reports: of those of a launcher the first one does."""
    return getattr(rank_zero_only, "rank", 0) in (0, None)


def files(workload: str, tiny: bool, logs: Path) -> list[str]:
    """Its configurations; what comes later wins."""
    names = (workload, f"{workload}_tiny") if tiny else (workload,)
    return [*(str(CONFIGS / f"{name}.yaml") for name in names), *[str(logs / "workers.yaml")] * tiny]
