"""Two workers on one device whose gradients cross a shaped link: real processes, real bytes, over gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from lab.bench.links import Namespace, linked_namespaces, why_no_links
from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.links import DENSITY, KNOWN
from lab.gpu.processes import free_port, tell, trained
from lab.gpu.stages import Setting
from lab.gpu.training import Phase
from lightning_safusion import SAFusionStrategy
from lightning_safusion.baselines.hooks import POWERSGD_START
from lightning_safusion.systems.rows import SYSTEMS, HookSystem

RATES = ("1gbit", "10gbit")
_SENTENCES = 256
# Steps before those that are timed, and these. The engine's first 64 windows record everything.
_ENGINE, _HOOK, _REHEARSED = (66, 24), (POWERSGD_START + 4, 16), (2, 1)


def _phase(place: Device, system: str) -> Phase:
    counts = _HOOK if isinstance(SYSTEMS[system], HookSystem) else _ENGINE
    return Phase(_SENTENCES, *counts) if place.cuda else Phase(4, *_REHEARSED)


def _strategy(system: str) -> SAFusionStrategy:
    density = None if isinstance(SYSTEMS[system], HookSystem) else DENSITY
    return SAFusionStrategy(system=system, density=density, process_group_backend="gloo")


def _linked(rank: int, folder: str, rehearse: bool, machines: list[Namespace], port: int) -> None:
    """One of the processes."""
    machines[rank].enter()  # before threads of its own: they would stay outside
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": machines[0].address, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": str(rank)}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    place, found = Device(rehearse), {}
    for number, system in enumerate(KNOWN):
        os.environ["MASTER_PORT"] = str(port + number)
        found[system] = trained(place, rank, _strategy(system), _phase(place, system))
        tell(folder, rank, found)
        if dist.is_initialized():
            dist.destroy_process_group()


def _figures(rate: str, folder: Path) -> Iterator[Figure]:
    """What both processes have told."""
    files = [folder / f"{rank}.json" for rank in range(2)]
    first, second = (json.loads(file.read_text()) if file.exists() else {} for file in files)
    both = [system for system in KNOWN if system in first and system in second]
    for system in both:
        yield equal(f"{rate}, {system}: replicas are equal", first[system]["digest"] == second[system]["digest"])
        about = "" if isinstance(SYSTEMS[system], HookSystem) else first[system]["plain_ddp"]
        about = about and f"plain DDP took over: {about}"
        yield note(f"{rate}, {system}: step", first[system]["seconds"] * 1e3, "ms", about)
    if both == list(KNOWN):
        default, *others = (first[system]["seconds"] for system in KNOWN)
        yield note(f"{rate}: default over the best of {', '.join(KNOWN[1:])}", min(others) / default)


def shaped(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    reason = why_no_links()
    if reason is not None:
        yield note("shaped links", f"not measured: {reason}")
        return
    for rate in RATES:
        folder = setting.folder / f"shaped-{rate}"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        try:
            with linked_namespaces(2, rate) as machines:
                arguments = (str(folder), setting.rehearse, machines, free_port())
                torch.multiprocessing.start_processes(_linked, arguments, nprocs=2, start_method="spawn")
        except RuntimeError as error:  # a container may refuse what root may do elsewhere
            yield note("shaped links", f"not measured: {error}"[:200])
            return
        finally:
            yield from _figures(rate, folder)
