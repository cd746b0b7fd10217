"""The sum in two phases: what an all-reduce gives, in two halves that may lie far apart; and what 16 bits round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.comm.collectives.allreduce import DenseAllReduce, TwoPhaseSum
from lightning_safusion.comm.exchange import SpanSpec
from tests.comm.exchanges import CPU, Workers, gradients, in_lines, in_threads


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, torch.float32), (2, torch.float16), (3, torch.bfloat16), (5, torch.float32)]
)
def test_equals_the_all_reduce_bit_for_bit(world_size: int, dtype: torch.dtype) -> None:
    for numel in (0, 1, 2, 7, 1000):
        xs = [x.to(dtype) for x in gradients(world_size, numel)]

        def both(transport: LocalTransport, xs: list[Tensor] = xs) -> tuple[Tensor, Tensor]:
            total = TwoPhaseSum(len(xs[0]), dtype, transport, CPU)
            for _ in range(2):  # buffers are used again
                total.buffer.copy_(xs[transport.rank])
                total.start()
                total.start_second()
                total.wait()
            whole = xs[transport.rank].clone()
            transport.all_reduce(whole).wait()
            return total.buffer, whole

        for mine, whole in in_threads(local_transports(world_size, timeout=20.0), both):
            assert torch.equal(mine, whole)


def test_the_second_phase_may_wait_until_others_have_begun() -> None:
    """All first phases, then all second ones, each awaited when it is needed."""
    xs = [gradients(3, 50, seed=seed) for seed in range(2)]

    def run(transport: LocalTransport) -> list[Tensor]:
        pair = [TwoPhaseSum(50, torch.float32, transport, CPU) for _ in xs]
        for total, x in zip(pair, xs, strict=True):
            total.buffer.copy_(x[transport.rank])
            total.start()
        for total in reversed(pair):
            total.start_second()
        for total in pair:
            total.wait()
        return [total.buffer for total in pair]

    for sums in in_threads(in_lines(3), run):
        for total, x in zip(sums, xs, strict=True):
            torch.testing.assert_close(total, torch.stack(x).sum(0))


def test_the_rounding_of_a_part_to_16_bits_stays_with_its_rank() -> None:
    spec = SpanSpec(100, 0, (0, 100), ((0, 100, torch.float32),))
    workers = Workers(3, spec, lambda spec, transport: DenseAllReduce(spec, transport, CPU, half=True))
    xs = [gradients(1, 100)[0], torch.zeros(100), torch.zeros(100)]
    xs[0][7] = 1e6
    mine, *others = workers.step(xs)
    torch.testing.assert_close(mine.mean.float() * 3, mine.sent, rtol=1e-6, atol=0)
    assert not torch.equal(mine.sent, xs[0])
    assert mine.sent[7] == pytest.approx(65504, rel=2**-11)
    assert not any(other.sent.any() for other in others)
