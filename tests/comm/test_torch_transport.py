from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_safusion.comm.transport.torch_backend import SoloTransport, TorchTransport, default_transport
from tests.comm.exchanges import released
from tests.process_group import run_ranks


def sums(rank: int) -> list[float]:
    tensor = torch.randn(10_001, generator=torch.Generator().manual_seed(rank))
    default_transport().all_reduce(tensor).wait()
    return tensor.tolist()


def test_sums_are_bitwise_equal() -> None:
    first, *others = run_ranks(3, sums)
    assert all(first == other for other in others)


def measured(rank: int) -> dict[str, Any]:
    transport = default_transport()
    called: list[float] = []
    tensor = torch.ones(100)
    alive = weakref.ref(tensor)
    start = time.perf_counter()
    work = transport.all_reduce(tensor)
    work.on_done(called.append)
    work.wait()
    deadline = time.perf_counter() + 10
    while not called and time.perf_counter() < deadline:
        time.sleep(0.001)
    work.wait()  # again, without harm
    work.on_done(called.append)
    del tensor
    return {"calls": len(called), "ordered": start <= called[0] <= called[1], "released": released(alive)}


def test_on_done_and_lifetime() -> None:
    assert run_ranks(2, measured) == [{"calls": 2, "ordered": True, "released": True}] * 2


def own_groups(rank: int) -> list[Any]:
    transport = TorchTransport(dist.group.WORLD, timeout=timedelta(seconds=20))
    first, second = transport.subgroup(), transport.subgroup()
    tensors = [torch.ones(1), torch.full((1,), 10.0)]
    launches = [lambda: first.all_reduce(tensors[0]), lambda: second.all_reduce(tensors[1])]
    # each communicator has an order of its own: the ranks launch on the two in different order
    works = [launch() for launch in (launches if rank == 0 else launches[::-1])]
    for work in works:
        work.wait()
    groups = len(dist.distributed_c10d._world.pg_map)
    transport.close()
    transport.close()
    left = len(dist.distributed_c10d._world.pg_map)
    again = transport.subgroup()
    again.all_reduce(tensors[0]).wait()
    transport.close()
    return [float(tensors[0]), float(tensors[1]), groups, left]


def test_subgroups_are_destroyed_by_close() -> None:
    assert run_ranks(2, own_groups) == [[4.0, 20.0, 3, 1]] * 2


def smaller_group(rank: int) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ValueError, match="process 0 is not a member"):
            TorchTransport(group)
        return None
    transport = TorchTransport(group)
    tensor = torch.tensor([float(rank)])
    transport.broadcast(tensor, source=1).wait()
    with pytest.raises(ValueError, match="needs all 3 processes, the process group has 2"):
        transport.subgroup()
    return transport.rank, transport.world_size, float(tensor), transport.gather_objects(rank)


def test_smaller_groups() -> None:
    assert run_ranks(3, smaller_group) == [None, (0, 2, 2.0, [1, 2]), (1, 2, 2.0, [1, 2])]


def close_after_the_default_group(rank: int) -> bool:
    transport = TorchTransport()
    transport.subgroup()
    dist.destroy_process_group()
    transport.close()
    return True


def test_close_after_the_default_group_is_gone() -> None:
    assert run_ranks(2, close_after_the_default_group) == [True, True]


def dead_peer(rank: int) -> list[str]:
    transport = TorchTransport(timeout=timedelta(seconds=1))
    groups = [transport.subgroup() for _ in range(3)]
    if rank == 1:
        time.sleep(2)
        return []
    large = torch.zeros(600_000, dtype=torch.uint8)
    errors = []
    for work in (
        groups[0].permute(torch.zeros(1), torch.zeros(1), [(1, 0)]),
        groups[1].all_reduce(torch.ones(1)),
        groups[2].all_gather(large, large[:300_000].clone()),
    ):
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_wait_raises_the_error_of_the_backend() -> None:
    errors = run_ranks(2, dead_peer)[0]
    assert len(errors) == 3  # the other worker may have left before the last one is waited for
    assert all("imed out" in error for error in errors[:2])


def test_a_single_process_needs_no_group() -> None:
    transport = default_transport()
    assert isinstance(transport, SoloTransport)
    called: list[float] = []
    work = transport.all_reduce(torch.ones(1))
    work.on_done(called.append)
    work.wait()
    assert len(called) == 1
    transport.subgroup().close()
    transport.close()


def test_torch_transport_without_a_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        TorchTransport()
