"""Workers that wait for each other in different places of a job are told where; workers that are slow are not."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from lightning_safusion.comm.transport.lockstep import VALIDATION, Lockstep, OutOfStepError, wait_watchfully
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from tests.process_group import run_ranks


def _out_of_step(call: Any) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(OutOfStepError) as caught:
        call()
    return str(caught.value), time.monotonic() - begin


def test_objects_never_meet_gradients() -> None:
    def run(rank: int) -> tuple[list[Any], list[float]]:
        lockstep = Lockstep(torch.device("cpu"))
        transport = TorchTransport(lockstep=lockstep)
        received = torch.empty(64)
        if rank == 0:
            objects = transport.gather_objects({"rank": rank})
        work = transport.all_gather(received, torch.full((32,), float(rank)))
        if rank == 1:
            objects = transport.gather_objects({"rank": rank})
        work.wait()
        transport.close()
        lockstep.close()
        return objects, received[::32].tolist()

    assert run_ranks(2, run) == [([{"rank": 0}, {"rank": 1}], [0.0, 1.0])] * 2


def test_one_goes_on_while_the_other_meets() -> None:
    """Rank 0 has run out of batches, or comes to a barrier of its own; rank 1 waits in the exchange of the next."""

    def run(rank: int, exhausted: bool) -> tuple[str, float]:
        lockstep = Lockstep(torch.device("cpu"))
        transport = TorchTransport(lockstep=lockstep)
        lockstep.begin_batch(3, 0)
        if rank == 1:
            time.sleep(1.2)  # slow, and nothing is wrong
        lockstep.meet("barrier")
        if rank == 0:
            said = _out_of_step(lambda: lockstep.end_epoch(3, True) if exhausted else lockstep.meet("save"))
        else:
            lockstep.begin_batch(3, 1)
            said = _out_of_step(transport.all_reduce(torch.ones(4)).wait)
        lockstep.rest()
        return said

    for exhausted, words in (
        (
            True,
            "rank 0 has ended epoch 3 after 1 batches; rank 1 is in batch 2 of epoch 3. The numbers of batches differ",
        ),
        (False, "rank 0 is at save, after batch 1 of epoch 3; rank 1 is in batch 2 of epoch 3. Barriers, broadcasts"),
    ):
        for said, seconds in run_ranks(2, run, exhausted):
            assert words in said
            assert seconds < 4


def test_different_meetings_are_told_apart() -> None:
    def run(rank: int) -> str:
        lockstep = Lockstep(torch.device("cpu"))
        said, _ = _out_of_step(lambda: lockstep.meet(("a save", 'a "\n\\' + "long" * 100)[rank]))
        return said

    first, second = run_ranks(2, run)
    assert first == second
    assert "rank 0 is at a save, before the first batch; rank 1 is at a ???long" in first


def test_before_the_last_exchange_has_ended_more_batches_are_known() -> None:
    """Lightning may wait between two batches: then the next has not begun."""

    def run(rank: int) -> str:
        lockstep = Lockstep(torch.device("cpu"), None, lambda: rank == 1)
        lockstep.begin_batch(0, 9)
        if rank == 0:
            return _out_of_step(lambda: lockstep.end_epoch(0, True))[0]
        return _out_of_step(TorchTransport(lockstep=lockstep).all_reduce(torch.ones(1)).wait)[0]

    for said in run_ranks(2, run):
        assert "rank 0 has ended epoch 0 after 10 batches; rank 1 has more batches after batch 10 of epoch 0" in said


def test_one_is_told_to_stop_and_the_other_is_not() -> None:
    """Rank 1 has more batches, and still computes for a while, in which it could be told as well."""

    def run(rank: int) -> tuple[str, float]:
        begin = time.monotonic()
        lockstep = Lockstep(torch.device("cpu"), None, lambda: rank == 1, lambda: time.monotonic() > begin + 1)
        lockstep.begin_batch(0, 1)
        if rank == 0:
            return _out_of_step(lambda: lockstep.end_epoch(0, False))
        return _out_of_step(TorchTransport(lockstep=lockstep).all_reduce(torch.ones(1)).wait)

    for said, seconds in run_ranks(2, run):
        assert "rank 0 has ended epoch 0 after 2 batches; rank 1 has more batches after batch 2 of epoch 0" in said
        assert "trainer.should_stop" in said
        assert 0.9 < seconds < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [(False, "its last; rank 1 has more .* numbers of batches differ"), (None, "One was told to stop")],
)
def test_one_validates_and_the_other_goes_on(more: bool | None, words: str) -> None:
    """Rank 1 has more batches; for a while it may still come to the validation, as to the one before."""

    def run(rank: int) -> tuple[str, float]:
        begin = time.monotonic()
        mine = True if rank == 1 else more
        lockstep = Lockstep(
            torch.device("cpu"), None, lambda: mine, lambda: True, lambda: rank == 0 or time.monotonic() < begin + 1
        )
        lockstep.begin_batch(0, 3)
        if rank == 0:
            return _out_of_step(lambda: lockstep.meet(VALIDATION))
        return _out_of_step(TorchTransport(lockstep=lockstep).all_reduce(torch.ones(1)).wait)

    for said, seconds in run_ranks(2, run):
        assert "rank 0 is at the beginning of validation, after batch 4 of epoch 0" in said
        assert re.search(words, said)
        assert 0.9 < seconds < 4


def test_batches_of_the_next_epoch_are_none_of_the_one_that_all_have_ended() -> None:
    """Rank 0 has ended it and still saves; rank 1 knows already that there will be others."""

    def run(rank: int) -> Any:
        lockstep = Lockstep(torch.device("cpu"), more=lambda: rank == 1)
        lockstep.begin_batch(0, 63)
        lockstep.end_epoch(0, exhausted=True)
        lockstep.meet("save")
        for looking in range(2):
            if rank == looking:
                lockstep._look(lockstep._place)
            torch.distributed.barrier()
        lockstep.meet("the next save")
        lockstep.close()
        return lockstep.error

    assert run_ranks(2, run) == [None, None]


def test_where_a_wait_has_no_limit_the_work_is_asked() -> None:
    """As NCCL's: an error of the check ends the wait, and the work is not waited for."""

    class Work:
        asked = waited = 0

        def is_completed(self) -> bool:
            self.asked += 1
            return self.asked > 2

        def wait(self) -> None:
            self.waited += 1

    checks: list[int] = []
    work = Work()
    wait_watchfully(work, lambda: checks.append(work.waited), polls=True)  # type: ignore[arg-type]
    assert checks == [0, 0]
    assert work.waited == 1

    def fails() -> None:
        raise OutOfStepError("rank 1 has ended")

    work = Work()
    with pytest.raises(OutOfStepError):
        wait_watchfully(work, fails, polls=True)  # type: ignore[arg-type]
    assert work.waited == 0
