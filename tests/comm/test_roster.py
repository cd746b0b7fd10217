"""Who is lost: the others name it, with its host, whether it ends with an error, at once, or only does not answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from lightning_safusion.comm.transport import roster as module
from lightning_safusion.comm.transport.roster import Roster

HOST = "node-7"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Roster]]:
    """Rosters of workers in this process, which seem to be on a host of their own each, or all on one."""
    monkeypatch.setattr(module, "_PATIENCE_S", 3.0)  # a virtual machine may stand still for a second

    def build(hosts: list[str], store: Any = None) -> list[Roster]:
        store = dist.HashStore() if store is None else store
        rosters = []
        for rank, host in enumerate(hosts):
            monkeypatch.setattr(module.socket, "gethostname", lambda host=host: host)
            rosters.append(Roster(store, rank, len(hosts)))
        return rosters

    return build


def answers(rosters: list[Roster]) -> list[str]:
    """What those that are left say, the first of which has asked."""

    def look(roster: Roster) -> None:
        while not roster.known:  # one that looks before it was asked has nothing to answer
            roster.look()

    rosters[0].ask()
    threads = [Thread(target=look, args=(each,)) for each in rosters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each.lost() for each in rosters]


def test_who_does_not_answer_is_named_by_all(make: Callable[..., list[Roster]]) -> None:
    rosters = make(["a", "b", "c", "d"])
    said = answers([rosters[0], rosters[2]])
    process = os.getpid()
    assert (
        said
        == [
            f"rank 1 (process {process} on b) has ended, or does not answer; "
            f"rank 3 (process {process} on d) has ended, or does not answer"
        ]
        * 2
    )


def test_a_process_that_has_ended_is_known_to_its_host(make: Callable[..., list[Roster]]) -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # a zombie, which its parent has not looked at
    rosters = make([HOST] * 2)
    store = rosters[0]._store
    text = store.get("worker 1").decode()
    store.set("worker 1", text.replace(str(os.getpid()), str(process)))
    assert answers(rosters[:1]) == [f"rank 1 (process {process} on {HOST}) has ended"]
    os.waitpid(process, 0)
    assert module._Worker(1, process, HOST, module._process_space()).is_gone(rosters[0]._me)


def test_an_error_of_its_own_is_told(make: Callable[..., list[Roster]]) -> None:
    rosters = make([HOST] * 2)
    rosters[1].leave(ValueError("no room\nat all"))
    rosters[1].look()
    rosters[1].wait_left()
    assert answers(rosters[:1]) == [f"rank 1 (process {os.getpid()} on {HOST}) has ended with ValueError: no room"]


def test_where_all_answer_it_may_be_a_link(make: Callable[..., list[Roster]]) -> None:
    assert answers(make(["a", "b"])) == ["all workers answer, so that a link between them may have failed"] * 2


class Mortal:
    """A store that ends with its worker."""

    def __init__(self) -> None:
        self.store, self.alive = dist.HashStore(), True

    def __getattr__(self, name: str) -> Any:
        if not self.alive:
            raise dist.DistNetworkError("Broken pipe")
        return getattr(self.store, name)


def test_the_first_worker_is_lost_where_the_store_has_gone(make: Callable[..., list[Roster]]) -> None:
    store = Mortal()
    _, second = make(["a", "b"], store)
    second.look()
    store.alive = False
    second.ask()
    with pytest.raises(RuntimeError):
        second.look()
    second.store_has_gone()
    assert second.lost() == (
        f"rank 0 (process {os.getpid()} on a) has ended, or does not answer: the store of the job, which it keeps, "
        "has gone"
    )


def test_what_is_known_outlives_the_store(make: Callable[..., list[Roster]]) -> None:
    """The rank that keeps it may be the first to end for the loss of another."""
    store = Mortal()
    rosters = make(["a", "b", "c"], store)
    rosters[2].look()
    known = answers(rosters[::2])
    store.alive = False
    rosters[2].store_has_gone()
    assert [rosters[2].lost()] * 2 == known
    assert "rank 1 " in known[0]


def test_a_store_that_does_not_answer_keeps_no_error_back(
    make: Callable[..., list[Roster]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    rosters = make(["a", "b"])
    assert rosters[0].lost() == "it has ended, or does not answer"
    assert rosters[1].lost().endswith("nor does the store of the job, which rank 0 keeps")
