"""What a gradient pays for passing through the hook, above DDP with a hook that does nothing.

    $ python benchmarks/hook.py --tensors 500

One process and a process group of one, so that no exchange is in the figure: backward of many small layers, medians of
runs that alternate in one process. The cost of selecting elements grows with their number and is measured by
``benchmarks/selection.py``; here tensors are small on purpose. A second column sends everything dense, so that what is
left is the hook, the window and the delivery.
"""

# No "from __future__ import annotations": DDP compares a hook's annotation with the class itself.
import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion.comm import TorchTransport
from lightning_safusion.fusion.build import build_engine
from lightning_safusion.fusion.hook import DDPHook
from lightning_safusion.fusion.layout import specs_from_parameters
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


def wrapped(tensors: int, width: int, hook: str, args: argparse.Namespace) -> Callable[[], float]:
    """A function that runs one step and returns the seconds of its backward pass."""
    ddp = DistributedDataParallel(model(tensors, width), bucket_cap_mb=0, gradient_as_bucket_view=True)
    if hook == "noop":
        ddp.register_comm_hook(None, noop)
    else:
        parameters = list(ddp.module.named_parameters())
        density = 1.0 if hook == "dense" else args.density
        compressor = resolve_sparsifier("none" if hook == "dense" else hook)
        policy = Aligned(args.per_buffer) if args.per_buffer else Adaptive()
        settings = EngineSettings(
            compressor, ConstantDensity(density), policy, ResidualMemory(), collective="allgather"
        )
        specs = specs_from_parameters(parameters)
        measure = not args.per_buffer
        controller = build_engine(settings, specs, TorchTransport(), torch.device("cpu"), measure)
        ddp.register_comm_hook(None, DDPHook(controller, [p for _, p in parameters]).run)
    data = torch.randn(4, width)

    def step() -> float:
        loss = ddp(data).square().mean()
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin

    return step


def main() -> None:
    """Prints microseconds per tensor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--width", type=int, default=32, help="layers are width x width")
    parser.add_argument("--per-buffer", type=int, default=0, help="tensors in each buffer; 0: adaptive, as by default")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--hooks", default="dense,topk,gaussiank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hooks = ["noop", *args.hooks.split(",")]
    steps = {hook: wrapped(args.tensors, args.width, hook, args) for hook in hooks}
    times: dict[str, list[float]] = {hook: [] for hook in hooks}
    for turn in range(args.steps):
        for hook, step in steps.items():
            seconds = step()
            if turn >= args.steps // 2:
                times[hook].append(seconds)
    floor = statistics.median(times["noop"])
    size = args.per_buffer or "adaptive size"
    print(f"{args.tensors} tensors of {args.width}x{args.width} and {args.width}, buffers of {size}; CPU, 1 thread")
    for hook in hooks:
        median = statistics.median(times[hook])
        above = (median - floor) / args.tensors * 1e6
        print(f"{hook:10s} backward {median * 1e3:7.2f} ms   above no-op {above:6.2f} us per tensor")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
