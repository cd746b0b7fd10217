"""On a CUDA device: NCCL with streams, gloo, and a hot path that never makes the host wait. Skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import SAFusionStrategy, Selective
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB, DDPHook
from lightning_safusion.fusion.launching import offloaded
from lightning_safusion.fusion.layout import specs_from_parameters
from lightning_safusion.kernels.cuda import serves_buffers
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.registry import resolve_sparsifier
from tests.cluster import settings
from tests.models import TinyClassifier, equal, fit, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 8))


def train(
    rank: int, backend: str, device: torch.device, steps: int = 12, quiet: int = 8, **options: Any
) -> list[Tensor]:
    """Steps of SGD with the hook; from step ``quiet`` on a wait for the device is an error."""
    model = network().to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=OWN_BUCKETS_MB, gradient_as_bucket_view=True)
    params = list(model.named_parameters())
    chosen = settings(**({"collective": "allgather"} | options))
    nccl = backend == "nccl"
    specs = specs_from_parameters(params)
    engine = build_engine(chosen, specs, TorchTransport(), device, JobTraits(measure=False, deferred=nccl))
    hook = DDPHook(engine, [param for _, param in params])
    ddp.register_comm_hook(None, hook.run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(steps, 32, 64, generator=generator).to(device)
    for step in range(steps):
        if nccl and step == quiet:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        ddp(data[step]).square().mean().backward()
        optimizer.step()
    if nccl:
        torch.cuda.set_sync_debug_mode("default")
    engine.settle()
    hook.close()
    return weights(model.cpu())


def over(rank: int, backend: str, world_size: int, folder: str, device: torch.device = DEVICE, **options: Any) -> Any:
    torch.cuda.set_device(DEVICE)
    store = f"file://{folder}/{backend}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    try:
        return train(rank, backend, device, **options)
    finally:
        dist.destroy_process_group()


COMPRESSORS = [{"compressor": name} for name in ("topk", "gaussiank", "randomk")]
LANES = [{"fusion": Selective(2), "collective": "hybrid", "offload": offload} for offload in (False, True)]


@pytest.mark.parametrize("options", [*COMPRESSORS, {"compressor": "none", "density": 1.0}, *LANES], ids=str)
def test_nccl_streams_give_the_numbers_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(offloaded, "NOMINAL_HOST", LinearCost(0.0, 0.0))  # the host takes all that it may
    on_gpu = over(0, "nccl", 1, str(tmp_path), **options)
    on_cpu = over(0, "gloo", 1, str(tmp_path), torch.device("cpu"), **(options | {"offload": False}))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)


def share_the_device(rank: int, folder: str) -> None:
    torch.save(over(rank, "gloo", 2, folder, compressor="gaussiank"), f"{folder}/{rank}.pt")


def test_two_workers_on_one_device_over_gloo(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(share_the_device, (str(tmp_path),), nprocs=2, start_method="spawn")
    assert equal(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_a_trainer_on_one_device_over_nccl(precision: Any) -> None:
    # this memory keeps the hook in place with one worker
    strategy = SAFusionStrategy(compressor="topk", density=0.1, memory="dgc", collective="allgather")
    model = TinyClassifier(make=lambda params: torch.optim.SGD(params, 0.02))  # its momentum is the memory's
    params, losses, figures = fit(strategy, model, accelerator="gpu", devices=1, precision=precision)
    assert figures["plain_ddp"] is None
    assert figures["windows"] > 30
    assert all(torch.isfinite(param).all() for param in params)
    assert sum(losses[-10:]) < sum(losses[:10])


def many_tensors() -> tuple[Tensor, Segments]:
    """A span of tensors of all sizes, one of which fills many chunks."""
    sizes = np.array([3_000_000, 1, 0, 1024, 65_537, 20_000_000, 300])
    segments = Segments(
        np.concatenate([[0], np.cumsum(sizes)]),
        np.array([30_000, 1, 0, 10, 0, 200_000, 3]),
        tuple(range(len(sizes))),
        tuple((size,) for size in sizes.tolist()),
    )
    return torch.randn(segments.numel, generator=torch.Generator().manual_seed(7)), segments


def test_kernels_serve_the_device() -> None:
    pytest.importorskip("triton")
    assert serves_buffers(DEVICE)


@pytest.mark.parametrize("wire", ["eliasfano-bf16", "coo-fp32", "bitmap-fp16"])
@pytest.mark.parametrize("compressor", ["topk", "threshold"])
def test_the_kernels_send_what_the_cpu_sends_without_waiting(compressor: str, wire: str) -> None:
    pytest.importorskip("triton")
    x, segments = many_tensors()
    codec = resolve_codec(wire, segments.numel, segments.capacity, torch.float32)
    sparsifier = resolve_sparsifier(compressor)
    expected = torch.empty(codec.nbytes, dtype=torch.uint8)
    codec.encode(sparsifier.select(x, segments, 0), expected)

    span, out = x.to(DEVICE), torch.empty(codec.nbytes, dtype=torch.uint8, device=DEVICE)

    def work() -> Selection:
        selection = sparsifier.select(span, segments, 0)
        codec.encode(selection, out)
        return selection

    work()  # compiles, and copies the constants
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            out.fill_(255)
            work()
        positions, values = codec.decode(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.cpu(), expected)
    theirs, sent = codec.decode(expected)
    assert torch.equal(positions[: len(theirs)].cpu(), theirs)
    assert torch.equal(values[: len(theirs)].cpu(), sent)
