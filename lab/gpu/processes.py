"""Two workers on one device over gloo: replicas bit for bit, and the numbers of the CPU."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.jobs import DENSITY, Job, described, middle_shapes
from lab.gpu.stages import Setting
from lab.gpu.training import SHAPES, Phase, Steps, Transformer, fitted
from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.transport.torch_backend import TorchTransport

_WINDOWS, _COMPARED, _SENTENCES = 50, 6, 8
#: Parts in place of the default's, and whether the device ends windows; gloo makes the host wait for an exchange.
JOBS: dict[str, tuple[dict[str, Any], bool]] = {
    "all-gather, fused kernels": ({"memory": "residual"}, True),
    "all-gather, PyTorch's operations": ({"memory": "residual"}, False),
    "shards, fused kernels": ({"memory": "residual", "collective": "sharded"}, True),
    "shards, PyTorch's operations": ({"memory": "residual", "collective": "sharded"}, False),
    "shards, buffers of dense tensors": (
        {"memory": "residual", "collective": "sharded", "fusion": "wfbp", "dense": (1, 3)},
        True,
    ),
}


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _engines(place: Device, rank: int, given: dict[str, Any], deferred: bool, windows: int) -> dict[str, Any]:
    """The means of all windows as a digest, and the first window that differs from the CPU's (-1: none)."""
    parts = dict(given)
    specs = described(middle_shapes(not place.cuda), dense=parts.pop("dense", ()))
    transport = TorchTransport()
    ours = Job(place, specs, transport, deferred, **parts)
    theirs = Job(Device(rehearse=True), specs, transport, False, **parts)
    means, differs = [], -1
    for step in range(windows):
        ours.draw(2 * step + rank)
        ours.window()
        means.append(ours.means())
        if step < _COMPARED:
            theirs.draw(2 * step + rank)
            theirs.window()
            if differs < 0 and not torch.equal(means[-1], theirs.means()):
                differs = step
    ours.engine.settle()
    return {"digest": _digest(means), "differs": differs}


def _strategies() -> dict[str, Strategy]:
    gloo: dict[str, Any] = {"process_group_backend": "gloo"}
    return {"DDP": DDPStrategy(**gloo), "default": SAFusionStrategy(density=DENSITY, collective="allgather", **gloo)}


def trained(place: Device, rank: int, strategy: Strategy, phase: Phase) -> dict[str, Any]:
    """A Trainer's parameters as a digest, the seconds of a step, and why plain DDP took over; one of two workers."""
    # each has sentences of its own
    model = Transformer(SHAPES["middle" if place.cuda else "small"], phase.batch, seed=rank)
    steps = Steps(place, [phase])
    fitted(steps, model, strategy, num_nodes=2)
    found = {"seconds": steps.times[0].step, "plain_ddp": steps.plain_ddp or ""}
    return found | {"digest": _digest(list(model.parameters()))}


def tell(folder: str, rank: int, found: dict[str, Any]) -> None:
    """Replaces the file at once: it is read at any time."""
    path = Path(folder, f"{rank}.part")
    path.write_text(json.dumps(found))
    path.replace(path.with_suffix(".json"))


def _worker(rank: int, folder: str, rehearse: bool, port: int) -> None:
    torch.set_num_threads(1)
    place, found = Device(rehearse), {}
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
    for name, (given, deferred) in JOBS.items():
        found[name] = _engines(place, rank, given, deferred, 4 if rehearse else _WINDOWS)
        tell(folder, rank, found)
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": str(rank)}
    phase = Phase(_SENTENCES, 66, 24) if place.cuda else Phase(_SENTENCES, 6, 2)
    for number, (name, strategy) in enumerate(_strategies().items()):
        os.environ["MASTER_PORT"] = str(port + number)
        found[name] = trained(place, rank, strategy, phase)
        tell(folder, rank, found)
        if dist.is_initialized():
            dist.destroy_process_group()


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _figures(first: dict[str, Any], second: dict[str, Any], told: set[str]) -> Iterator[Figure]:
    """What both workers have found, and nobody has been told."""
    for name in [name for name in first if name in second and name not in told]:
        told.add(name)
        yield equal(f"replicas are equal: {name}", first[name]["digest"] == second[name]["digest"])
        if "differs" in first[name]:
            step = first[name]["differs"]
            yield equal(f"means are those of the CPU: {name}", step < 0, "" if step < 0 else f"first in window {step}")
        else:
            yield note(f"step: {name}", first[name]["seconds"] * 1e3, "ms")


def processes(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    folder = setting.folder / "processes"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    arguments = (str(folder), setting.rehearse, free_port())
    context = torch.multiprocessing.start_processes(_worker, arguments, nprocs=2, join=False, start_method="spawn")
    files, told, over = [folder / f"{rank}.json" for rank in range(2)], set[str](), False
    while not over:
        try:
            over = context.join(timeout=0.5)
        finally:  # before the error of a worker
            first, second = (json.loads(file.read_text()) if file.exists() else {} for file in files)
            yield from _figures(first, second, told)
    ratio = first["default"]["seconds"] / first["DDP"]["seconds"]
    yield Figure("step over DDP's, two workers over gloo", ratio, most=1.05, note="the host waits for each exchange")
