"""Windows whose messages have checksums: one that is damaged is refused by all ranks."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.virtual import transport as virtual
from lightning_safusion import DamagedMessageError, SAFusionStrategy
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from lightning_safusion.fusion.build import JobTraits, build_engine
from tests.cluster import Cluster, settings, specs
from tests.fusion.windows import FEW, Make, train
from tests.models import equal
from tests.process_group import run_ranks

#: Workers, their nodes, and settings.
JOBS: dict[str, tuple[int, list[int] | None, dict[str, Any]]] = {
    "allgather": (2, None, {"fusion": "aligned"}),
    "hybrid": (2, None, {"fusion": "selective"}),
    "ticks": (2, None, {"collective": "allgather", "fusion": "horovod"}),
    "sharded": (3, None, {"wire": "q4"}),
    "hierarchical": (4, [0, 0, 1, 1], {"fusion": "single"}),
    "hierarchical-sharded": (4, [0, 0, 1, 1], {"fusion": "single", "wire": "q4"}),
    "gtopk": (3, None, {"fusion": "single"}),
    "oktopk": (3, None, {"fusion": "single"}),
}
#: Ranks that get something damaged: a root, and another one.
RECEIVERS = (0, 1)


class Damage:
    """Flips a bit of one message on its way to a rank: of the ``number``-th that arrives there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.receiver, self.arrived = 0, 0, 0
        self._here = threading.local()
        wait = virtual.LocalWork.wait

        def noisy(work: virtual.LocalWork) -> None:
            output, here = work._output, getattr(self._here, "rank", None) == self.receiver
            wait(work)
            got, call = work._exchange.finish(work._operation)[work._rank], work._operation.calls[work._rank]
            if (
                output is not None
                and here
                and got is not None
                and (call.kind, call.detail) != ("broadcast", work._rank)
            ):
                self._arrive(output)

        monkeypatch.setattr(virtual.LocalWork, "wait", noisy)

    def _arrive(self, message: Tensor) -> None:
        # not sums, nor the few bytes that say how long messages are, which tests/comm/test_sealed.py is about
        if message.dtype != torch.uint8 or len(message) <= 4 * (8 + 4):
            return
        if self.arrived == self.number:
            message[len(message) // 2] ^= 16
        self.arrived += 1

    def errors(self, cluster: Cluster, grads: list[list[Tensor]]) -> list[BaseException | None]:
        """What each rank raises in a window in which a message is damaged."""
        self.arrived = 0

        def run(rank: int) -> BaseException | None:
            self._here.rank = rank
            try:
                cluster.window(rank, grads)
            except RuntimeError as error:
                return error
            finally:
                self._here.rank = None
            return None

        return cluster.each(run)


def sealed(make: Make, job: str) -> Cluster:
    workers, nodes, options = JOBS[job]
    return make(
        workers, specs(FEW), nodes=nodes, **({"collective": job, "integrity": "checksum", "density": 0.05} | options)
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_damaged_message_is_refused_by_all_ranks_and_costs_nothing(
    make: Make, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, damage = sealed(make, job), Damage(monkeypatch)
    train(cluster, 3)
    refused = 0
    for damage.receiver in RECEIVERS:
        for damage.number in range(1000):
            before, grads = cluster.residuals(), cluster.random_grads(100 + damage.number)
            errors = damage.errors(cluster, grads)
            if damage.arrived <= damage.number:  # all have been damaged once
                assert errors == [None] * len(errors)
                break
            assert_refused(cluster, damage.receiver, errors)
            given = [grad for mine in grads for grad in mine]
            kept = [(old.float() + new).double() for old, new in zip(before, given, strict=True)]
            assert equal(cluster.residuals(), kept)
            refused += 1
    assert refused
    means = cluster.step(cluster.random_grads(200))
    assert all(equal(means[0], other) for other in means[1:]), "replicas differ"


def assert_refused(cluster: Cluster, receiver: int, errors: list[BaseException | None]) -> None:
    assert all(isinstance(error, DamagedMessageError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    text = rf"a message of rank \d was damaged on its way to rank {receiver}, .* the buffer with t\d.* in step (\d+):"
    found = re.search(text, str(errors[0]))
    assert found
    assert int(found[1]) == cluster.engines[0].windows


@pytest.mark.parametrize("job", JOBS)
def test_checksums_change_no_mean(make: Make, job: str) -> None:
    workers, nodes, options = JOBS[job]
    plain = make(workers, specs(FEW), nodes=nodes, **({"collective": job, "density": 0.05} | options))
    assert equal(train(sealed(make, job), 4), train(plain, 4))
    assert not plain.engines[0].space.transport.sealed
    assert plain.engines[0].space.transport is plain.transports[0] or job == "ticks"


def _gloo(rank: int) -> list[str]:
    """Two windows in a real process, of which the first has a damaged message on its way to the second rank."""
    torch.manual_seed(rank)
    given = settings(collective="allgather", integrity="checksum", fusion="single")
    tensors = specs(((300, 40), (40,)))
    transport = TorchTransport()
    engine = build_engine(given, tensors, transport, torch.device("cpu"), JobTraits(measure=False))
    gather = transport.all_gather

    def noisy(output: Tensor, tensor: Tensor) -> Any:
        work = gather(output, tensor)
        if rank == 1 and engine.windows == 2:
            work.wait()
            output[40] ^= 1
        return work

    transport.all_gather = noisy  # type: ignore[method-assign]
    said = []
    for step in range(5):
        grads = [torch.randn(spec.numel) for spec in tensors]
        try:
            for index in (1, 0):
                engine.push(index, grads[index])
            engine.drain()
            said.append(str(sum(float(grad.double().sum()) for grad in grads)))
        except DamagedMessageError as error:
            said.append(f"{step}: {error}")
            transport.all_gather = gather  # type: ignore[method-assign]
    return said


def test_two_real_processes_refuse_it() -> None:
    first, second = run_ranks(2, _gloo)
    assert first == second
    assert re.match(r"2: a message of rank 0 was damaged on its way to rank 1, .*with t1, t0 in step 2:", first[2])
    assert not any("damaged" in said for said in (*first[:2], *first[3:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"integrity": "crc"}, "unknown integrity 'crc'"),
        ({"collective": "allreduce"}, "integrity='checksum' verifies messages before"),
        ({"fusion": "naive", "wire": "bf16"}, "integrity='checksum' verifies messages before"),
        ({"system": "ddp"}, "it has no integrity"),
        ({"system": "wfbp-dense"}, "got collective='allreduce'"),
    ],
)
def test_what_has_no_messages_of_its_own_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        SAFusionStrategy(**({"integrity": "checksum"} | options))


def test_messages_of_a_device_are_refused() -> None:
    given, (transport,) = settings(integrity="checksum"), virtual.local_transports(1)
    with pytest.raises(ValueError, match=r"integrity='checksum' is for gradients in host memory, got cuda"):
        build_engine(given, specs(), transport, torch.device("cuda"))
