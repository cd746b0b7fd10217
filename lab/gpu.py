"""Selection and packing on a CUDA device against a copy of the same bytes.

All tensors of a model are one buffer, selected from before fusion: one segment per tensor. Every row is the median of
runs timed with CUDA events, in one process with the copy. "span read" is the span's bytes over the time; the exact
selection needs four passes over the span, and "of copy" is the bandwidth of these four against that of the copy. The
hot path runs with synchronisation turned into an error, and once more as a CUDA graph.

    $ python -m lab gpu --density 0.01 --json gpu.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.markdown import markdown
from lab.selection import per_tensor
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels.cuda import serves
from lightning_safusion.simulate.trace import resolve_trace
from lightning_safusion.sparsify import Segments, Sparsifier, available_sparsifiers, resolve_sparsifier

MODELS = ("bert-large", "resnet-152")
EXACT_PASSES = 4  # three digits, and the marks
CAPTURED = ("topk", "threshold", "gaussiank")  # the others draw or learn on the host, which a graph would freeze


def milliseconds(work: Callable[[], Any], repetitions: int) -> float:
    """Median time of ``work`` on the device."""
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repetitions // 2]


def hot_path(sparsifier: Sparsifier, x: Tensor, segments: Segments, wire: str) -> Callable[[], None]:
    """Selection from the span, and a message of it."""
    codec = resolve_codec(wire, segments.numel, segments.capacity, torch.float32)
    out = torch.empty(codec.nbytes, dtype=torch.uint8, device=x.device)

    def work() -> None:
        codec.encode(sparsifier.select(x, segments, 0), out)

    return work


def warm(work: Callable[[], None]) -> str | None:
    """Compiles and runs a few times; returns why the host had to wait for the device, None if it had not."""
    work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure(model: str, names: Sequence[str], density: float, wire: str, repetitions: int) -> list[dict[str, Any]]:
    """One row per sparsifier, and one for the copy."""
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [tensor.shape for tensor in resolve_trace(model).tensors]
    numel = sum(map(math.prod, shapes))
    x = torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(0))
    target = torch.empty_like(x)
    copy_ms = milliseconds(lambda: target.copy_(x), repetitions)
    copy_rate = 8 * numel / copy_ms / 1e6  # GB/s, read and written
    rows: list[dict[str, Any]] = [
        {"model": model, "tensors": len(shapes), "elements": numel, "name": "copy", "ms": copy_ms, "GB/s": copy_rate}
    ]
    for name in names:
        sparsifier = resolve_sparsifier(name)
        work = hot_path(sparsifier, x, per_tensor(sparsifier, shapes, density), wire)
        waits = warm(work)
        ms = milliseconds(work, repetitions)
        row = {"model": model, "name": name, "ms": ms, "GB/s": 4 * numel / ms / 1e6, "waits": waits}
        if name == "topk":
            row["of copy"] = EXACT_PASSES * 4 * numel / ms / 1e6 / copy_rate
        if waits is None and name in CAPTURED:
            row["graph ms"] = milliseconds(captured(work), repetitions)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a model's rows."""
    copy = rows[0]
    print(f"\n{copy['model']}: {copy['tensors']} tensors, {copy['elements'] / 1e6:.1f} M elements\n")
    cells = [
        (
            row["name"],
            f"{row['ms']:.3f}",
            f"{row['ms'] / copy['ms']:.2f}",
            f"{row['GB/s']:.0f}",
            f"{row['of copy']:.0%}" if "of copy" in row else "",
            f"{row['graph ms']:.3f}" if "graph ms" in row else "",
            row.get("waits") or "",
        )
        for row in rows
    ]
    print(markdown(("", "ms", "x copy", "GB/s", "of copy", "graph ms", "waits for the device"), cells))


def gpu(
    models: Sequence[str] = MODELS,
    sparsifiers: Sequence[str] = (),
    density: float = 0.01,
    wire: str = "auto",
    repetitions: int = 50,
    json: Path | None = None,
) -> None:
    """Selection and packing on a CUDA device against a copy of the same bytes.

    Args:
        models: "bert-large", "resnet-152".
        sparsifiers: Their names; all by default.
        density: Share of the elements.
        wire: Format of the message.
        repetitions: Runs of which the median is taken.
        json: File for the figures.

    Raises:
        RuntimeError: If there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("this needs a CUDA device, and PyTorch sees none here: nothing was measured")
    triton = serves(torch.device("cuda", torch.cuda.current_device()))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{where}, density {density}, {'Triton kernels' if triton else 'PyTorch operations (no Triton)'}")
    rows: list[dict[str, Any]] = []
    for model in models:
        measured = measure(model, sparsifiers or available_sparsifiers(), density, wire, repetitions)
        show(measured)
        rows += measured
    if json is not None:
        about = {"device": where, "triton": triton, "density": density, "command": sys.argv}
        json.write_text(dumps(about | {"rows": rows}, indent=1))
