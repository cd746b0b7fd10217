"""What a gradient pays for passing through the hook, above DDP with a hook that does nothing.

    $ python -m lab hook --tensors 500

One process and a process group of one, so that no exchange is in the figure: backward of many small layers, medians of
runs that alternate in one process. The cost of selecting elements grows with their number and is measured by
``python -m lab selection``; here tensors are small on purpose. A second column sends everything dense, so that what is
left is the hook, the window and the delivery.

Where Triton is installed, a last line has the CPU time that Python takes for a gradient where fused kernels select:
``Engine.push`` on tensors in host memory, with launches that start nothing. What CUDA takes for launches, streams and
events is for a device to say (``python -m lab gpu --stages windows``).
"""

# No "from __future__ import annotations": DDP compares a hook's annotation with the class itself.
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion.comm.exchange import TensorFlag
from lightning_safusion.comm.transport.torch_backend import SoloTransport, TorchTransport
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.fused import FusedShipment
from lightning_safusion.fusion.hook import OWN_BUCKETS_MB, DDPHook
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.policy import Aligned
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.sparsify import ConstantDensity, ResidualMemory, resolve_sparsifier


def noop(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Returns the bucket as it is."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def model(tensors: int, width: int) -> nn.Module:
    """A chain of layers with ``tensors`` parameter tensors in all."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))


def wrapped(tensors: int, width: int, hook: str, sparse: float, per_buffer: int) -> Callable[[], float]:
    """A function that runs one step and returns the seconds of its backward pass."""
    ddp = DistributedDataParallel(model(tensors, width), bucket_cap_mb=OWN_BUCKETS_MB, gradient_as_bucket_view=True)
    if hook == "noop":
        ddp.register_comm_hook(None, noop)
    else:
        parameters = list(ddp.module.named_parameters())
        density = 1.0 if hook == "dense" else sparse
        compressor = resolve_sparsifier("none" if hook == "dense" else hook)
        policy = Aligned(per_buffer) if per_buffer else Adaptive()
        settings = EngineSettings(
            compressor, ConstantDensity(density), policy, ResidualMemory(), collective="allgather"
        )
        specs = specs_from_parameters(parameters)
        measure = not per_buffer
        engine = build_engine(settings, specs, TorchTransport(), torch.device("cpu"), JobTraits(measure=measure))
        ddp.register_comm_hook(None, DDPHook(engine, [p for _, p in parameters]).run)
    data = torch.randn(4, width)

    def step() -> float:
        loss = ddp(data).square().mean()
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin

    return step


def all_fresh(_: object, copy: Tensor, buffers: Sequence[Any]) -> tuple[int, list[Tensor]]:
    """Takes the place of ``WindowKernels.read``: what a device says at the end of a window that went well."""
    headers = [torch.full((each.world, each.tables.pieces.heads + 1), int(TensorFlag.FRESH)) for each in buffers]
    return 0, [torch.nn.functional.pad(header[:, :-1], (0, 1)).to(torch.uint8) for header in headers]


def pushed(tensors: int, width: int, steps: int) -> tuple[float, int]:
    """CPU seconds that ``Engine.push`` takes for a gradient, median of windows, and how many buffers there are.

    Args:
        tensors: Gradients of a window, of width x width and of width elements in turn.
        width: Of these.
        steps: Windows; the first half warms up.

    Raises:
        RuntimeError: If the buffers are not those of fused kernels.
    """
    from lightning_safusion.kernels.cuda.window import WindowKernels  # imports Triton

    sizes = [width * (1 if index % 2 else width) for index in range(tensors)]
    specs = [TensorSpec(f"t{i}", i, (size,), size, torch.float32) for i, size in enumerate(sizes)]
    settings = EngineSettings(
        resolve_sparsifier("topk"), ConstantDensity(0.02), Adaptive(), ResidualMemory(), collective="allgather",
        wire="q4",
    )  # fmt: skip
    with (
        patch("lightning_safusion.fusion.fused.serves_buffers", lambda device: True),
        patch("lightning_safusion.kernels.cuda.launch.launch", lambda *arguments, **constants: None),
        patch.object(WindowKernels, "read", all_fresh),
    ):
        engine = build_engine(
            settings, specs, SoloTransport(), torch.device("cpu"), JobTraits(measure=False, deferred=True)
        )
        grads, times = [torch.zeros(size) for size in sizes], []
        for _ in range(steps):
            begin = time.process_time()
            for index in reversed(range(tensors)):
                engine.push(index, grads[index])
            times.append(time.process_time() - begin)
            engine.drain()
    if engine.record is None or not all(isinstance(each, FusedShipment) for each in engine.record._shipments):
        raise RuntimeError("kernels do not serve these buffers")
    return statistics.median(times[steps // 2 :]) / tensors, len(engine.record._shipments)


def hook(
    tensors: int = 500,
    width: int = 32,
    per_buffer: int = 0,
    density: float = 0.01,
    steps: int = 160,
    hooks: Sequence[str] = ("dense", "topk", "gaussiank"),
) -> None:
    """Microseconds per tensor that a gradient pays for passing through the hook, above a hook that does nothing.

    Args:
        tensors: Parameter tensors.
        width: Layers are width x width.
        per_buffer: Tensors in each buffer; 0: adaptive, as by default.
        density: Share of the elements that is sent.
        steps: Of each hook; the first half warms up.
        hooks: "dense", or names of sparsifiers.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = ["noop", *hooks]
    passes = {name: wrapped(tensors, width, name, density, per_buffer) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(steps):
        for name, step in passes.items():
            seconds = step()
            if turn >= steps // 2:
                times[name].append(seconds)
    floor = statistics.median(times["noop"])
    size = per_buffer or "adaptive size"
    print(f"{tensors} tensors of {width}x{width} and {width}, buffers of {size}; CPU, 1 thread")
    for name in names:
        median = statistics.median(times[name])
        above = (median - floor) / tensors * 1e6
        print(f"{name:10s} backward {median * 1e3:7.2f} ms   above no-op {above:6.2f} us per tensor")
    dist.destroy_process_group()
    if find_spec("triton") is not None:
        seconds, buffers = pushed(tensors, width, steps)
        print(f"fused kernels, launches stubbed: {seconds * 1e6:.2f} us of CPU time per tensor, {buffers} buffers")
