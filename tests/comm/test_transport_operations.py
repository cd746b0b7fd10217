"""Every operation of a transport, on virtual workers, on real ones, and on one alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.virtual.transport import local_transports
from lightning_safusion.comm.transport.interface import ReduceOp, Transport, Work
from lightning_safusion.comm.transport.torch_backend import SoloTransport, TorchTransport
from tests.comm.exchanges import in_threads, released
from tests.process_group import run_ranks

WORLDS = [1, 2, 3, 5]
OPS: tuple[ReduceOp, ...] = ("sum", "min", "max")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def pieces(source: int, destination: int) -> list[int]:
    """What ``source`` sends: as many numbers as both ranks together say, none to some."""
    return [10 * source + destination] * ((source + 2 * destination) % 4)


def operations(transport: Transport) -> dict[str, Any]:
    """Everything at once, waited for in another order."""
    rank, n = transport.rank, transport.world_size
    works: list[Work] = []
    sizes = [4097, 300_001, 1]  # neither multiples of 4 nor of the ranks; two ranks of gloo swap what is large
    gathered = [torch.zeros(size * n, dtype=torch.uint8) for size in sizes]
    works += [transport.all_gather(into, torch.full((len(into) // n,), rank, dtype=torch.uint8)) for into in gathered]
    reduced: dict[tuple[ReduceOp, torch.dtype], torch.Tensor] = {}
    for op in OPS:
        for dtype in DTYPES:
            reduced[op, dtype] = torch.tensor([rank, -rank, 3 * rank]).to(dtype)
            works.append(transport.all_reduce(reduced[op, dtype], op))
    copied = torch.full((2,), rank)
    works.append(transport.broadcast(copied, source=n - 1))
    out = [pieces(rank, other) for other in range(n)]
    into = [pieces(other, rank) for other in range(n)]
    tensor = torch.tensor([number for piece in out for number in piece], dtype=torch.uint8)
    received = torch.zeros(sum(map(len, into)), dtype=torch.uint8)
    works.append(transport.all_to_all(received, tensor, list(map(len, into)), list(map(len, out))))
    shares = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        shares[str(dtype)] = torch.zeros(2, dtype=dtype)
        works.append(transport.reduce_scatter(shares[str(dtype)], torch.arange(2 * n).to(dtype) + rank))
    ring = torch.full((3,), -1.0)
    round_trip = [(r, (r + 1) % n) for r in range(n)] if n > 1 else []
    works.append(transport.permute(ring, torch.full((3,), float(rank)), round_trip))
    single = torch.full((1,), -1.0)
    works.append(transport.permute(single, torch.full((1,), 7.0), [(n - 1, 0)] if n > 1 else []))
    parity = [[r for r in range(n) if r % 2 == p] for p in range(2) if p < n]
    group = transport.split(parity)
    summed = torch.tensor([float(rank)])
    works.append(group.all_reduce(summed))
    for work in reversed(works):
        work.wait()
        work.wait()
    ranks = torch.arange(n, dtype=torch.uint8)
    return {
        "gathered": [torch.equal(got, ranks.repeat_interleave(len(got) // n)) for got in gathered],
        "reduced": [reduced[op, dtype].tolist() for op in OPS for dtype in DTYPES],
        "copied": copied.tolist(),
        "objects": transport.gather_objects({"rank": rank}),
        "received": received.tolist() == [number for piece in into for number in piece],
        "shares": {dtype: share.tolist() for dtype, share in shares.items()},
        "ring": ring.tolist(),
        "single": single.item(),
        "group": [group.rank, group.world_size, summed.item()],
    }


def check(rank: int, n: int, result: dict[str, Any]) -> None:
    total, last = sum(range(n)), n - 1
    sums, least, most = [total, -total, 3 * total], [0, -last, 0], [last, 0, 3 * last]
    assert result["gathered"] == [True] * 3
    assert result["reduced"] == [each for each in (sums, least, most) for _ in DTYPES]
    assert result["copied"] == [last] * 2
    assert result["objects"] == [{"rank": each} for each in range(n)]
    assert result["received"]
    share = [n * (2 * rank + i) + sum(range(n)) for i in range(2)]
    assert result["shares"] == {str(d): share for d in (torch.float32, torch.bfloat16, torch.int64)}
    assert result["ring"] == [(rank - 1) % n if n > 1 else -1.0] * 3
    assert result["single"] == (7.0 if rank == 0 and n > 1 else -1.0)
    mine = range(rank % 2, n, 2)
    assert result["group"] == [rank // 2, len(mine), sum(mine)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_virtual_ranks(world_size: int) -> None:
    for rank, result in enumerate(in_threads(local_transports(world_size), operations)):
        check(rank, world_size, result)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_real_ranks(world_size: int) -> None:
    for rank, result in enumerate(run_ranks(world_size, lambda rank: operations(TorchTransport()))):
        check(rank, world_size, result)


def test_a_single_worker() -> None:
    check(0, 1, operations(SoloTransport()))


def test_bytes_are_counted() -> None:
    def work(transport: Any) -> list[float]:
        before = []
        sizes = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]  # [source][destination]
        out, into = sizes[transport.rank], [row[transport.rank] for row in sizes]
        transport.all_to_all(torch.zeros(sum(into)), torch.zeros(sum(out)), into, out).wait()
        before += [transport.bytes_sent, transport.bytes_received]
        transport.reduce_scatter(torch.zeros(10), torch.zeros(30)).wait()
        before += [transport.bytes_sent, transport.bytes_received]
        transport.permute(torch.zeros(5), torch.zeros(5), [(0, 1), (2, 0)]).wait()
        return [*before, transport.bytes_sent, transport.bytes_received]

    assert in_threads(local_transports(3), work) == [
        [12, 36, 92, 116, 112, 136],
        [32, 32, 112, 112, 112, 132],
        [52, 28, 132, 108, 152, 108],
    ]


def test_reduce_scatter_of_16_bit_floats_rounds_once() -> None:
    values = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16

    def work(rank: int) -> float:
        share = torch.zeros(1, dtype=torch.bfloat16)
        TorchTransport().reduce_scatter(share, values[rank].repeat(3)).wait()
        return float(share)

    assert run_ranks(3, work) == [258.0] * 3


def test_sizes_that_do_not_match_raise_on_all_ranks() -> None:
    first, second = local_transports(2)
    works = [
        first.all_to_all(torch.zeros(2), torch.zeros(3), [1, 1], [1, 2]),
        second.all_to_all(torch.zeros(2), torch.zeros(2), [1, 1], [1, 1]),
    ]
    for work in works:
        with pytest.raises(RuntimeError, match=r"rank 1 expects pieces of \[1, 1\] .*, the ranks send it \[2, 1\]"):
            work.wait()


def nothing(*arguments: Any) -> torch.Tensor:
    return torch.zeros(*arguments)


WRONG: list[tuple[Callable[[Transport], Any], str]] = [
    (lambda t: t.all_to_all(nothing(1), nothing(1), [1, 1], [1]), r"output of 1 elements needs 1 sizes .*got \[1, 1\]"),
    (lambda t: t.all_to_all(nothing(1), nothing(3), [1], [2]), r"tensor of 3 elements needs 1 sizes .*got \[2\]"),
    (lambda t: t.permute(nothing(1), nothing(1), [(0, 0)]), r"different ranks below 1.*got \[\(0, 0\)\]"),
    (lambda t: t.permute(nothing(1), nothing(1), [(0, 3)]), r"different ranks below 1.*got \[\(0, 3\)\]"),
    (lambda t: t.split([[0, 0]]), r"each of the ranks 0 to 0 once.*got \[\[0, 0\]\]"),
    (lambda t: t.split([[]]), r"each of the ranks 0 to 0 once.*got \[\[\]\]"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments(call: Callable[[Transport], Any], message: str) -> None:
    for transport in (*local_transports(1), SoloTransport()):
        with pytest.raises(ValueError, match=message):
            call(transport)


def test_more_wrong_arguments() -> None:
    first, second = local_transports(2, timeout=1.0)
    with pytest.raises(ValueError, match="needs 4 elements, got 3"):
        first.reduce_scatter(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="source and a destination once"):
        first.permute(torch.zeros(2), torch.zeros(2), [(0, 1), (0, 1)])
    with pytest.raises(ValueError, match="ascending"):
        first.split([[1, 0]])
    first.split([[0], [1]])
    with pytest.raises(ValueError, match="all ranks must pass the same groups"):
        second.split([[0, 1]])


def test_what_a_library_lacks_is_named() -> None:
    class Lacking(SoloTransport):
        all_to_all = Transport.all_to_all
        permute = Transport.permute
        split = Transport.split

    tensor, transport = torch.zeros(1), Lacking()
    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: transport.all_to_all(tensor, tensor, [1], [1]),
        "permute": lambda: transport.permute(tensor, tensor, []),
        "split": lambda: transport.split([[0]]),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"Lacking has no {name}: use transport='torch'"):
            call()


def lifetimes(rank: int) -> list[Any]:
    transport = TorchTransport()
    called: list[float] = []
    tensor, share = torch.ones(4), torch.zeros(2)
    alive = weakref.ref(tensor)
    works = [
        transport.reduce_scatter(share, tensor),
        transport.permute(share.clone(), tensor[:2], [(0, 1), (1, 0)]),
        transport.all_to_all(torch.zeros(4), tensor, [2, 2], [2, 2]),
    ]
    works[1].on_done(called.append)
    before = len(called)
    for work in works:
        work.wait()
        work.on_done(called.append)
    del tensor
    return [before, len(called), released(alive)]


def test_works_call_back_once_and_keep_nothing() -> None:
    assert run_ranks(2, lifetimes) == [[0, 4, True]] * 2
