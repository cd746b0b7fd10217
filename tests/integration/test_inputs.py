"""Workers with different numbers of batches that train on, and batches of different sizes that are weighted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.inputs import Inputs
from lightning_safusion.integration.uneven import Team, UnevenLoader
from tests.process_group import run_ranks


def team() -> Team:
    return Team(timedelta(seconds=20), lambda: None, lambda what: nullcontext())


class Unsized:
    """Batches without a length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_all_workers_have_equally_many_batches() -> None:
    lengths = ((2, 3, 0), (1, 1, 1), (0, 0, 2))

    def run(rank: int) -> list[Any]:
        found, all_of_us = [], team()
        for own in lengths:
            for make in (list, Unsized):
                for joins in (True, False):
                    loader = UnevenLoader(make(f"{rank}.{i}" for i in range(own[rank])), all_of_us, joins)
                    next(iter(loader), None)  # a pass that is left in the middle
                    passes = [[(batch, loader.having()) for batch in loader] for _ in range(2)]
                    found.append((loader.lengths is None or len(loader), passes))
        return found

    found = run_ranks(3, run)
    cases = ((own, make, joins) for own in lengths for make in (list, Unsized) for joins in (True, False))
    for number, (own, make, joins) in enumerate(cases):
        together = max(own) if joins else min(own)
        lender = next(rank for rank, length in enumerate(own) if length)
        for rank in range(3):
            length, passes = found[rank][number]
            assert length == (together if make is list else True)
            # nobody's last batch is that of a worker which has had none; that one keeps what was lent to it
            rest = f"{rank}.{own[rank] - 1}" if own[rank] else f"{lender}.0"
            batches = [f"{rank}.{i}" if i < own[rank] else rest for i in range(together)]
            assert passes == [[(batch, [i < each for each in own]) for i, batch in enumerate(batches)]] * 2


def test_workers_ask_each_other_where_a_length_may_be_untrue_or_an_iterator_begins_anew() -> None:
    class Anew(Unsized):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[Any]:
            self.left = list(self.batches)
            return self

        def __next__(self) -> Any:
            if not self.left:
                self.left = list(self.batches)
                raise StopIteration
            return self.left.pop(0)

    def run(rank: int) -> list[Any]:
        loader = UnevenLoader(Anew([[rank, i] for i in range(1 + rank)]), team(), joins=True)
        popped = [(batch.pop(0), loader.having()) for batch in loader]  # a training step may take them apart
        loader.release()
        return [popped, loader.having(), len(list(loader))]

    having = [[True, True], [False, True]]
    assert run_ranks(2, run) == [[[(rank, has) for has in having], None, 1 + rank] for rank in range(2)]


def test_a_loader_keeps_the_attributes_of_its_own() -> None:
    def run(rank: int) -> tuple[Any, ...]:
        inner = DataLoader(TensorDataset(torch.arange(3)), num_workers=0)
        loader: Any = UnevenLoader(inner, team(), joins=True)
        loader.worker_init_fn = print
        return loader.dataset is inner.dataset, inner.worker_init_fn is print, loader.batch_size, hasattr(loader, "no")

    assert run_ranks(2, run) == [(True, True, 1, False)] * 2


def test_a_sampler_that_is_shorter_than_it_says_is_named() -> None:
    class Short(list[int]):
        def __len__(self) -> int:
            return super().__len__() + 1

    def run(rank: int) -> str:
        loader = UnevenLoader(Short([1, 2]), team(), joins=True)
        with pytest.raises(RuntimeError, match="has a length of 3, and only 2 batches") as caught:
            list(loader)
        return str(caught.value)

    assert all(f"rank {rank} " in said for rank, said in enumerate(run_ranks(2, run)))


class Step(LightningModule):
    def training_step(self, batch: Any) -> None: ...


def test_shares() -> None:
    """The loss of a worker is multiplied by its samples over the mean of all workers' samples."""

    def run(rank: int) -> list[Any]:
        found: list[Any] = []
        inputs = Inputs("join", "samples", 2, team)
        batches = [torch.zeros(8), torch.zeros(24)][rank : rank + 1] * (1 + rank)
        for _ in range(2):  # loaders are made anew in some epochs
            for batch in inputs.take(batches, Step()):
                inputs.begin(batch)
                inputs.end_step(torch.zeros(()))
                found.append((inputs.idle, *[float(inputs.weigh(torch.tensor(2.0))) for _ in range(2)]))
        given = Inputs("error", "samples", 2, team)
        for samples in (1, 3):
            given.begin([] if rank else torch.zeros(5))  # of which nothing is found on rank 1
            given.end_step({"batch_size": samples if rank else torch.tensor(3)})
            found.append(float(given.weigh(torch.tensor(2.0))))
        unknown = Inputs("error", "samples", 2, team)
        unknown.begin([] if rank else torch.zeros(5))
        with pytest.raises(MisconfigurationException, match="of the batch of rank 1: let training_step return"):
            unknown.weigh(torch.tensor(2.0))
        return found

    first, second = run_ranks(2, run)
    assert first == [(False, 1.0, 1.0), (True, 0.0, 0.0)] * 2 + [3.0, 2.0]
    assert second == [(False, 3.0, 3.0), (False, 4.0, 4.0)] * 2 + [1.0, 2.0]


def test_a_loader_that_has_ended_has_no_part_in_later_batches() -> None:
    """As in a CombinedLoader of mode max_size."""

    def run(rank: int) -> list[bool]:
        inputs = Inputs("join", "workers", 2, team)
        long, short = (inputs.take(Unsized(range(1, 1 + count)), Step()) for count in (3, 1 + rank))
        several = list(zip_longest(long, short))
        found = []
        for batch in several:
            inputs.begin(batch)
            found.append(inputs.idle)
        return found

    assert run_ranks(2, run) == [[False, True, False], [False, False, False]]


def test_batches_of_nothing_are_left_out_and_what_cannot_be_copied_is_named() -> None:
    def run(rank: int) -> list[Any]:
        some = list(UnevenLoader(Unsized([[1, None], [None, 2, 3, None]][rank]), team(), joins=True))
        with pytest.raises(RuntimeError, match=r"A batch of rank 1 cannot be copied .*pickle") as caught:
            list(UnevenLoader(Unsized([lambda: None] * rank), team(), joins=True))
        return [some, type(caught.value).__name__]

    assert run_ranks(2, run) == [[[1, 1], "RuntimeError"], [[2, 3], "RuntimeError"]]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"uneven_inputs": "joins"}, ValueError, "uneven_inputs"),
        ({"weighting": "sample"}, ValueError, "Did you mean 'samples'"),
        ({"weighting": "world"}, ValueError, "use it with uneven_inputs='join'"),
        ({"weighting": "samples", "system": "easgd"}, ValueError, "averages no gradients"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SAFusionStrategy(**options)
