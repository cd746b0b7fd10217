"""Run by every worker of a horovodrun: uses the transport in all ways and writes down what came of it."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.transport.horovod import HorovodTransport

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8)


def collectives(transport: HorovodTransport) -> dict[str, Any]:
    """Everything at once, then waited for in another order."""
    rank, n = transport.rank, transport.world_size
    message = torch.full((4097,), rank + 1, dtype=torch.uint8)
    gathered = torch.zeros(4097 * n, dtype=torch.uint8)
    halves = torch.zeros(2 * n, dtype=torch.bfloat16)
    nothing = torch.zeros(0)
    works = [
        transport.all_gather(gathered, message),
        transport.all_gather(halves, torch.tensor([rank, 0.5]).bfloat16()),
        transport.all_gather(nothing, nothing),
        transport.all_reduce(nothing),
        transport.broadcast(nothing),
    ]
    reduced = {}
    for dtype in DTYPES:
        for op in ("sum", "min", "max"):
            tensor = reduced[f"{dtype}-{op}"] = torch.tensor([rank, 3 * rank + 1]).to(dtype)
            works.append(transport.all_reduce(tensor, op))
    copied = torch.tensor([rank, rank + 1], dtype=torch.int16)
    works.append(transport.broadcast(copied, source=n - 1))
    for work in reversed(works):
        work.wait()
    return {
        **{key: tensor.tolist() for key, tensor in reduced.items()},
        "gathered": [sorted(set(part.tolist())) for part in gathered.split(4097)],
        "halves": halves.tolist(),
        "copied": copied.tolist(),
        "objects": transport.gather_objects({"rank": rank} if rank == 0 else None),
    }


def sums(transport: HorovodTransport) -> str:
    """Sums of numbers of many magnitudes, as their bits."""
    tensor = torch.randn(10_001, generator=torch.Generator().manual_seed(transport.rank)) ** 5
    transport.all_reduce(tensor).wait()
    return bytes(tensor.view(torch.uint8).tolist()).hex()


def many(transport: HorovodTransport) -> list[float]:
    """More operations of one size under way at once than there are names, while one rank is slow."""
    tensors = [torch.tensor([float(i)]) for i in range(100)]
    works = []
    for tensor in tensors:
        if transport.rank == 0:
            time.sleep(0.001)
        works.append(transport.all_reduce(tensor))
    for work in works:
        work.wait()
    return [float(tensor) for tensor in tensors]


def pieces(transport: HorovodTransport) -> list[bool]:
    """Pieces of unequal sizes to all ranks, and shares of a sum; more of both under way than there are names."""
    rank, n = transport.rank, transport.world_size
    right, pending = [], []
    for turn in range(40):
        sizes = [
            [(3 * source + destination + turn * (source + 1)) % 5 for destination in range(n)] for source in range(n)
        ]
        out, into = sizes[rank], [row[rank] for row in sizes]
        tensor = torch.cat([torch.full((size,), float(10 * rank + other)) for other, size in enumerate(out)])
        received = torch.full((sum(into),), -1.0)
        expected = [float(10 * other + rank) for other, size in enumerate(into) for _ in range(size)]
        pending.append((transport.all_to_all(received, tensor, into, out), received, expected))
        share = torch.zeros(2, dtype=torch.bfloat16)
        total = [float(n * (2 * rank + place) + sum(range(n)) + n * turn) for place in range(2)]
        tensor = torch.arange(2 * n).bfloat16() + rank + turn
        pending.append((transport.reduce_scatter(share, tensor), share, total))
    for work, received, expected in reversed(pending):
        work.wait()
        right.append(received.tolist() == expected)
    return right


def lacking(transport: HorovodTransport) -> list[str]:
    """What is said of operations that Horovod has not."""
    said = []
    for call in (lambda: transport.permute(torch.zeros(1), torch.zeros(1), []), lambda: transport.split([])):
        try:
            call()
        except NotImplementedError as error:
            said.append(str(error))
    return said


def abandoned(transport: HorovodTransport) -> list[float]:
    """An operation that nobody waits for does not write into its buffer once that is used for something else."""
    buffer = torch.zeros(transport.world_size)
    for value in range(40):
        transport.all_gather(buffer, torch.tensor([float(value)]))
    transport.close()
    return buffer.tolist()


def own_pace(transport: HorovodTransport) -> list[float]:
    """Two communicators, on which the ranks launch in different order."""
    first, second = transport.subgroup(), transport.subgroup()
    tensors = [torch.ones(1), torch.full((1,), 10.0)]
    launches = [lambda: first.all_reduce(tensors[0]), lambda: second.all_reduce(tensors[1])]
    for work in [launch() for launch in (launches if transport.rank == 0 else launches[::-1])]:
        work.wait()
    return [float(tensor) for tensor in tensors]


def measured(transport: HorovodTransport) -> dict[str, bool]:
    """When an operation ended, and what it leaves behind."""
    called: list[float] = []
    tensor = torch.ones(100)
    alive = weakref.ref(tensor)
    start = time.perf_counter()
    work = transport.all_reduce(tensor)
    work.on_done(called.append)
    deadline = time.perf_counter() + 10
    while not called and time.perf_counter() < deadline:
        time.sleep(0.001)
    noticed = len(called)  # although nobody has waited for it
    work.wait()
    work.wait()
    work.on_done(called.append)
    del tensor
    while alive() is not None and time.perf_counter() < deadline:  # the thread that called may not have ended the call
        gc.collect()
        time.sleep(0.001)
    return {
        "noticed": noticed == 1,
        "once": len(called) == 2,
        "ordered": start <= called[0] <= called[1],
        "released": alive() is None,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    transport = HorovodTransport()
    result = {
        "place": [transport.rank, transport.world_size],
        "collectives": collectives(transport),
        "sums": sums(transport),
        "many": many(transport),
        "pieces": pieces(transport),
        "lacking": lacking(transport),
        "own_pace": own_pace(transport),
        "measured": measured(transport),
        "costs": [cost.fixed for cost in calibrate(transport, torch.device("cpu"), 0.1).values()],
        "abandoned": abandoned(HorovodTransport()),
    }
    try:
        transport.all_reduce(torch.tensor([True]))
    except TypeError as error:
        result["refused"] = str(error)
    transport.close()
    transport.close()
    (folder / f"collectives{transport.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
