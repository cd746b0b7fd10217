"""The emulated link: what waits for how long, what comes, and that hooks of torch and our exchanges pass it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("triton")

from lab.gpu import network as module
from lab.gpu.device import Device
from lab.gpu.jobs import Job, described, shapes_of
from lab.gpu.network import Network, link_of
from lightning_safusion.baselines.hooks import POWERSGD_START, HookExchange
from lightning_safusion.comm.cost import Link
from lightning_safusion.fusion import fused
from tests.packaging.environments import ROOT, run
from tests.process_group import run_ranks

PLACE = Device(rehearse=True)
#: A millisecond for a message, and one for a thousand bytes.
SLOW = Link(alpha=1e-3, beta=1e-6)


class Clock:
    """Takes the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_operations_wait_for_the_link_one_after_the_other(clock: Clock) -> None:
    network = Network(PLACE, SLOW, 4)
    transport = network.transport()
    gathered, own, reduced = torch.zeros(1000), torch.arange(250.0), torch.ones(1000)
    first, second = transport.all_gather(gathered, own), transport.subgroup().all_reduce(reduced)
    assert clock.now == 100.0
    first.wait()
    assert clock.now == pytest.approx(100.0 + 3e-3 + 3 * 1000e-6)
    second.wait()
    first.wait()  # again: it has ended
    assert clock.now == pytest.approx(100.006 + 6e-3 + 2 * 3 / 4 * 4000e-6)
    assert network.seconds == pytest.approx(clock.now - 100.0)
    assert torch.equal(gathered.view(4, -1), own.expand(4, -1))
    assert torch.equal(reduced, torch.full((1000,), 4.0))
    network.free = True
    transport.all_gather(gathered, own).wait()
    assert network.seconds == pytest.approx(clock.now - 100.0)


def test_pieces_come_from_echoes(clock: Clock) -> None:
    network = Network(PLACE, SLOW, 3)
    transport = network.transport()
    own, output = torch.arange(6.0), torch.full((6,), -1.0)
    transport.all_to_all(output, own, [2, 2, 2], [2, 2, 2]).wait()
    assert output.tolist() == [0.0, 1.0] * 3
    assert clock.now == pytest.approx(100.0 + 2e-3 + 4 * 4e-6)
    uneven = torch.full((4,), -1.0)
    transport.all_to_all(uneven, own, [0, 2, 2], [0, 3, 3]).wait()  # it sends itself nothing
    assert uneven.tolist() == [-1.0] * 4
    summed = torch.zeros(2)
    transport.reduce_scatter(summed, own).wait()
    assert summed.tolist() == [0.0, 3.0]
    rows = torch.zeros(3, 2)
    transport.gather_alone(rows, own[2:4]).wait()
    assert rows.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_network_checks_itself() -> None:
    figure = Network(PLACE, link_of("10gbit"), 8).checked(PLACE)
    assert figure.name.startswith("emulated link of 10 Gbit/s")
    assert 0.99 < figure.value < 50  # a busy machine may be late


@pytest.mark.parametrize(("hook", "steps"), [("bf16", 1), ("powersgd", POWERSGD_START + 2)])
def test_hooks_of_torch_pass_the_link(hook: str, steps: int, clock: Clock) -> None:
    def train(rank: int) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        network, model = Network(PLACE, SLOW, 8), nn.Linear(64, 64)
        ddp, seconds = DistributedDataParallel(model), list[float]()
        with network.installed():
            HookExchange(hook, None).register(ddp)  # type: ignore[arg-type]
            for _ in range(steps):
                before = network.seconds
                ddp(torch.eye(64)).square().sum().backward()
                seconds.append(network.seconds - before)
        return [param.grad for param in model.parameters() if param.grad is not None], seconds

    (gradients, seconds), *_ = run_ranks(1, train)
    cost, elements = SLOW.allreduce(8), 64 * 64 + 64
    if hook == "bf16":
        assert seconds == [pytest.approx(cost(2 * elements))]
    else:
        assert seconds[0] == pytest.approx(cost(4 * elements))
        # rows and columns of rank 1, and the bias
        assert seconds[-1] == pytest.approx(2 * cost(4 * 64) + cost(4 * 64))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.slow
def test_windows_with_owners_of_shards_are_good(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(fused, "serves_buffers", fused.serves_buffers)
    network = Network(PLACE, SLOW, 8)
    with network.installed():
        job = Job(PLACE, described(shapes_of(True)), network.transport(), collective="sharded")
        job.draw(0)
        for window in range(2):
            before = network.seconds
            job.draw(window)
            job.window()
            job.engine.settle()  # raises if a message is damaged
    assert network.seconds - before > 2 * 7 * SLOW.alpha
    assert job.means().any()


@pytest.mark.slow
def test_the_wait_reads_the_clock_again_and_again() -> None:
    program = (
        "import triton; from triton.compiler import ASTSource; from triton.backends.compiler import GPUTarget; "
        "from lab.gpu.network import pass_time; "
        "source = ASTSource(pass_time, {'seconds': 'fp32'}, {}); "
        "print(triton.compile(source, target=GPUTarget('cuda', 90, 32), options={'num_warps': 1}).asm['ptx'])"
    )
    before, loop = run(sys.executable, "-c", program, cwd=ROOT, TRITON_INTERPRET="0").split("$L__BB0_", 1)
    assert "%globaltimer" in before
    assert "%globaltimer" in loop
    assert "bra" in loop
