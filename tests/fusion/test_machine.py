"""Whatever a job goes through, in any order: replicas stay equal, and nothing is lost but what is declared so."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from lightning_safusion.comm.catalogue import COLLECTIVES, find_collective
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.plans.registry import POLICIES, resolve_fusion
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.state import carried, common_state, restore_carried
from lightning_safusion.integration import checkpoint
from lightning_safusion.sparsify.memory.residual import MEMORIES
from lightning_safusion.sparsify.schedule import DensitySchedule
from tests.cluster import Cluster, settings, specs
from tests.fusion.windows import attempt
from tests.models import equal

#: Uneven, one element, empty.
TENSORS = specs(((20, 12), (20,), (1,), (0,), (30, 25), (7,), (40, 10)))
NAMES = [spec.name for spec in TENSORS]
CHOICES: dict[str, tuple[Any, ...]] = {
    "collective": tuple(COLLECTIVES),
    "compressor": ("topk", "gaussiank", "sidco", "dgc", "redsync", "adtopk", "oktopk", "randomk"),
    "memory": ("residual", "residual", "residual", *MEMORIES),
    "integrity": (None, None, "checksum"),
    "wire": ("auto", "fp32", "eliasfano-bf16", "q4", "sign", "bitmap-q2", "coo-fp16"),
    "fusion": tuple(each.name for each in POLICIES),
    "scope": ("tensor", "tensor", "group"),
    "quota": ("proportional", "shared", "pooled"),
    "offload": (False, False, True),
}


def _go_together(options: Mapping[str, Any]) -> bool:
    try:
        settings(**options)
    except ValueError:
        return False
    return True


OPTIONS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}).filter(
    _go_together
)
SEEDS = st.integers(0, 99)
SOME = st.sets(st.sampled_from(NAMES), max_size=3)  # tensors
RANK = st.integers(0, 4)  # of as many workers as there are
SKIPPED = st.just(set()) | SOME  # tensors whose optimizer does not step


class Set(DensitySchedule):
    """A density that is set between windows."""

    def __init__(self) -> None:
        self.density = 0.1

    def __call__(self, step: int, epoch: int) -> float:
        return self.density


class _Took(NamedTuple):
    """One window, by rank and registration index."""

    grads: list[list[Tensor]]
    fresh: list[list[bool]]
    means: list[list[Tensor]]
    unstepped: list[Any]  # tensors whose gradient before has not been used
    plain: bool  # averaged as DDP does


class Job(RuleBasedStateMachine):
    """A job of virtual workers, and what it must hold back, by name of the tensor: the sum over ranks."""

    cluster: Cluster
    ticking: bool
    conserves: bool  # the parts promise that nothing is lost: otherwise only replicas are compared
    held: dict[str, Tensor]  # float64
    largest: dict[str, float]  # magnitude so far, of which float32 has rounded a part

    # The job

    @initialize(options=OPTIONS, workers=st.integers(1, 5), tracked=st.booleans(), deferred=st.booleans())
    def start(self, options: dict[str, Any], workers: int, tracked: bool, deferred: bool) -> None:
        self.options, self.tracked = options, tracked
        fusion = resolve_fusion(options["fusion"])
        self.ticking = fusion.ticking
        self.deferred = deferred and not fusion.streams and not fusion.ticking
        self.density = Set()
        self.folder = tempfile.TemporaryDirectory()
        self.saved: tuple[Any, ...] | None = None
        self.held = {spec.name: torch.zeros(spec.numel, dtype=torch.float64) for spec in TENSORS}
        self.largest = dict.fromkeys(NAMES, 1.0)
        self._build(workers, TENSORS)
        ability = find_collective(options["collective"]).exchange.ability
        self.conserves = self.cluster.settings[0].memory.conserves and ability.conserves

    def _build(
        self, workers: int, tensors: Sequence[TensorSpec], make: Callable[[], Any] | None = None, **more: Any
    ) -> None:
        def anew() -> Any:
            return settings(**self.options, density=self.density)

        nodes = [rank // 2 for rank in range(workers)]
        self.cluster = Cluster(workers, make or anew, tensors, deferred=self.deferred, nodes=nodes)
        self.wary = self.spoiled = False
        self.settled = True
        for engine in self.cluster.engines:
            engine.steps.tracked[:] = self.tracked

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self._close()
            self.folder.cleanup()

    def _close(self) -> None:
        for engine in self.cluster.engines:
            engine.launching.release()
        self.cluster.close()

    # What must hold after every rule

    @invariant()
    def replicas_agree_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "cluster"):
            return
        engines = self.cluster.engines
        for engine in engines:
            assert engine._window is None
            assert not engine.missing()
        known = [
            (engine.windows, engine.order_known, engine.planner.current, engine.space.quotas.counts.tolist())
            for engine in engines
        ]
        assert all(each == known[0] for each in known), known
        if self.settled:
            states = self.cluster.each(lambda rank: common_state(engines[rank]))
            assert all(state == states[0] for state in states)
            self._settle()
            for name, held in self._held().items():
                self._assert_close(name, sum(held), self.held[name])

    def _settle(self) -> None:
        self.cluster.each(lambda rank: self.cluster.engines[rank].settle())
        self.wary |= self.spoiled
        self.settled, self.spoiled = True, False

    def _held(self) -> dict[str, list[Tensor]]:
        ranks = range(len(self.cluster.engines))
        return {
            spec.name: [self.cluster.residual(rank, spec.index).clone() for rank in ranks]
            for spec in self.cluster.specs
        }

    def _assert_close(self, name: str, found: Any, expected: Any, but: str = "") -> None:
        bound = 2e-5 * self.largest[name]
        if self.conserves:
            torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=lambda m: f"{name}{but}: {m}")

    # Windows

    @rule(seed=SEEDS, turned=st.booleans(), skipped=SKIPPED, settle=st.booleans())
    def window(self, seed: int, turned: bool, skipped: set[str], settle: bool) -> None:
        self._window(seed, skipped, settle, order=self._order()[::-1] if turned else None)

    @precondition(lambda self: not self.deferred)
    @rule(seed=SEEDS, stale=st.dictionaries(st.sampled_from(NAMES), st.none() | RANK, min_size=1), skipped=SKIPPED)
    def window_with_stale_tensors(self, seed: int, stale: dict[str, int | None], skipped: set[str]) -> None:
        """On one rank, or (None) on all."""
        self._window(seed, skipped, True, stale=stale)

    @rule(seed=SEEDS, name=st.sampled_from(NAMES), rank=RANK, skipped=SKIPPED, settle=st.booleans())
    def window_that_is_not_finite(self, seed: int, name: str, rank: int, skipped: set[str], settle: bool) -> None:
        self._window(seed, skipped, settle, bad=(rank % len(self.cluster.engines), name))

    @precondition(lambda self: not self.deferred)
    @rule(seed=SEEDS, name=st.sampled_from(NAMES), rank=RANK, stale=st.sampled_from(NAMES), at=RANK, skipped=SKIPPED)
    def window_with_both(self, seed: int, name: str, rank: int, stale: str, at: int, skipped: set[str]) -> None:
        self._window(seed, skipped, True, {stale: at}, (rank % len(self.cluster.engines), name))

    @precondition(lambda self: not self.ticking)  # whose workers cannot go on from that
    @rule(
        seed=SEEDS,
        pushed=st.integers(1, len(TENSORS)),
        then=st.sampled_from(("again", "another", "nothing")),
        skipped=SKIPPED,
    )
    def abandon_a_backward_pass(self, seed: int, pushed: int, then: str, skipped: set[str]) -> None:
        """The same tensors come again, or another pass after it is forgotten, or something else."""
        self._settle()
        before, grads = self._held(), self.cluster.random_grads(seed)
        again = then == "again" and not self.options["offload"]  # its thread may still add

        def run(rank: int) -> None:
            engine = self.cluster.engines[rank]
            for index in self._order()[:pushed]:
                engine.push(index, grads[rank][index].clone())
            if not again:
                engine.reset()

        self.cluster.each(run)
        self._all_or_nothing(before, grads)
        if then != "nothing":
            self._window(seed + 100, skipped, True)

    @precondition(lambda self: not self.deferred)
    @rule(seed=SEEDS, failing=RANK, after=st.integers(0, 2))
    def window_that_a_rank_fails_to_fill(self, seed: int, failing: int, after: int) -> None:
        """At one of its buffers."""
        self._settle()
        engines = self.cluster.engines
        if engines[0].dense:
            return  # without buffers
        failing %= len(engines)
        before, grads, windows = self._held(), self.cluster.random_grads(seed), engines[0].windows
        calls, fill = [0], Shipment.fill

        def fails(part: str) -> Any:
            calls[0] += part == "select"
            if part == "select" and calls[0] > after:
                raise ValueError("no room")
            return nullcontext()

        def filled(shipment: Shipment, *args: Any) -> None:
            if shipment.buffer.exchange.transport.rank == failing:
                shipment.range = fails
            fill(shipment, *args)

        with patch.object(Shipment, "fill", filled):
            said = attempt(self.cluster, grads, self._order())
        if calls[0] <= after:
            after = 0
        assert all(said) or not any(said), said
        if any(said):
            assert said[failing] == "no room"
            assert all("another rank could not select" in each for rank, each in enumerate(said) if rank != failing)
            assert [engine.windows for engine in engines] == [windows] * len(engines)
        self._all_or_nothing(before, grads, lost=not any(said))

    def _all_or_nothing(self, before: dict[str, list[Tensor]], grads: list[list[Tensor]], lost: bool = False) -> None:
        """A gradient of a window that was not ended is in its residual, or as if it had never been."""
        after = self._held()
        for spec in self.cluster.specs:
            name = spec.name
            for was, now, grad in zip(before[name], after[name], (own[spec.index] for own in grads), strict=True):
                self.largest[name] = max([self.largest[name], *grad.abs().tolist()])
                if lost:
                    continue
                added = any((now - was).tolist()) and bool(grad.any())
                self._assert_close(name, now, was + grad if added else was, " of a window that was not ended")
            self.held[name] = sum(after[name])  # type: ignore[assignment]

    def _order(self) -> list[int]:
        """Registration indices as gradients arrive."""
        return [spec.index for spec in self.cluster.engines[0].space.layout.specs]

    def _drawn(
        self, seed: int, stale: Mapping[str, int | None], bad: tuple[int, str] | None
    ) -> tuple[list[list[Tensor]], list[list[bool]], str | None]:
        """Gradients of all ranks, which of them are fresh, and the tensor that one rank has spoiled."""
        cluster, ranks = self.cluster, range(len(self.cluster.engines))
        grads, fresh = cluster.random_grads(seed), [[True] * len(cluster.specs) for _ in ranks]
        for spec in cluster.specs:
            if spec.name in stale:
                at = stale[spec.name]
                for rank in ranks if at is None else [at % len(ranks)]:
                    fresh[rank][spec.index] = False
                    if at is not None:
                        grads[rank][spec.index].zero_()  # as DDP has them
        spoiled = None
        for spec in cluster.specs:
            if bad is not None and spec.name == bad[1] and spec.numel and fresh[bad[0]][spec.index]:
                grads[bad[0]][spec.index][spec.numel // 2] = math.nan
                spoiled = spec.name
        return grads, fresh, spoiled

    def _account(
        self, spec: TensorSpec, took: _Took, spoiled: str | None, seen: str | None, skipped: Collection[str]
    ) -> None:
        """What became of a tensor in a window: replicas are equal, and what was not sent is held."""
        i, name = spec.index, spec.name
        mine, got = [own[i].double() for own in took.grads], [own[i] for own in took.means]
        if not any(flags[i] for flags in took.fresh):
            assert equal(got, [own[i] for own in took.grads]), f"{name}: stale everywhere, and not left as it was"
            return
        assert all(torch.equal(got[0].view(torch.int32), each.view(torch.int32)) for each in got) or name == spoiled
        repeated = any(flags[i] and left[i] for flags, left in zip(took.fresh, took.unstepped, strict=True))
        whole = sum(mine)
        self.largest[name] = max([self.largest[name], *whole[whole.isfinite()].abs().tolist()])
        if took.plain or repeated or not all(flags[i] for flags in took.fresh) or (self.wary and name == spoiled):
            for each in got:
                finite = whole.isfinite()
                assert not each[~finite].isfinite().any()
                self._assert_close(name, each[finite].double() * len(took.grads), whole[finite], " averaged")
            return
        if name == spoiled:
            assert not any(each.isfinite().all() for each in got)
            self.held[name] += sum(grad for grad in mine if grad.isfinite().all())
        elif seen is not None and self.tracked and name in skipped:
            self.held[name] += 0 if self.wary else whole
        else:
            self.held[name] += whole - len(took.grads) * got[0].double()

    def _window(
        self,
        seed: int,
        skipped: Collection[str],
        settle: bool,
        stale: Mapping[str, int | None] | None = None,
        bad: tuple[int, str] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """One that ends, and steps of optimizers."""
        cluster, stale = self.cluster, stale or {}
        engines = cluster.engines
        if not self.settled:  # as its beginning does
            self._settle()
        grads, fresh, spoiled = self._drawn(seed, stale, bad)
        plain = engines[0].dense
        unstepped = [engine.steps.unstepped.copy() for engine in engines]
        means = cluster.step(grads, fresh, order or self._order())
        seen = spoiled  # of a tensor that is averaged as in DDP nobody looks at the elements
        if (
            bad is not None
            and not plain
            and any(unstepped[bad[0]][s.index] for s in cluster.specs if s.name == spoiled)
        ):
            seen = None
        took = _Took(grads, fresh, means, unstepped, plain)
        for spec in cluster.specs:
            self._account(spec, took, spoiled, seen, skipped)
        stepped = [spec.index for spec in cluster.specs if spec.name not in skipped]
        for engine in engines:
            engine.steps.stepped(stepped)
        self.settled, self.spoiled = False, seen is not None and not (plain and self.deferred)  # then nobody looks
        if settle:
            self._settle()

    # Between windows

    @rule(density=st.sampled_from((0.02, 0.1, 0.5, 1.0)))
    def set_density(self, density: float) -> None:
        self.density.density = density

    @rule()
    def save(self) -> None:
        path = Path(self.folder.name) / "a.ckpt"
        text = self.cluster.settings[0].describe()
        entry, *others = self.cluster.each(lambda rank: checkpoint.save(self.cluster.engines[rank], text, path))
        assert all(other == entry for other in others)
        self._settle()
        held = {name: tensor.clone() for name, tensor in self.held.items()}
        self.saved = entry, path, text, held, list(self.cluster.specs), len(self.cluster.engines)

    @precondition(lambda self: self.saved is not None)
    @rule(workers=st.integers(1, 5), same=st.booleans())
    def load(self, workers: int, same: bool) -> None:
        """On fresh engines of as many workers, or of others."""
        entry, path, text, held, tensors, before = self.saved or ()
        workers = before if same else workers
        self._close()
        self._build(workers, tensors)
        notes = self.cluster.each(lambda rank: checkpoint.restore(self.cluster.engines[rank], text, entry, path))
        assert notes == [[]] * workers
        self.held = {name: tensor * (workers / before) for name, tensor in held.items()}

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load_on_these_engines(self) -> None:
        entry, path, text, held, tensors, before = self.saved or ()
        if (tensors, before) == (list(self.cluster.specs), len(self.cluster.engines)):
            notes = self.cluster.each(lambda rank: checkpoint.restore(self.cluster.engines[rank], text, entry, path))
            assert notes == [[]] * before
            self.held = {name: tensor.clone() for name, tensor in held.items()}
            self.settled, self.spoiled = True, False

    @rule(frozen=SOME, replaced=SOME)
    def change_the_trainable_set(self, frozen: set[str], replaced: set[str]) -> None:
        """New engines take what the old ones held, but for parameters that were replaced."""
        kept = [spec for spec in TENSORS if spec.name not in frozen]
        tensors = [replace(spec, index=index) for index, spec in enumerate(kept)]
        cluster = self.cluster
        states = cluster.each(lambda rank: carried(cluster.engines[rank], replaced))
        self._close()
        mine = iter(cluster.settings)
        self._build(len(cluster.engines), tensors, lambda: next(mine))
        self.cluster.each(lambda rank: restore_carried(self.cluster.engines[rank], states[rank]))
        for spec in TENSORS:
            if spec.name in frozen | replaced:
                self.held[spec.name] = torch.zeros(spec.numel, dtype=torch.float64)


pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients of t"),
    pytest.mark.filterwarnings("ignore:.*computed on some ranks only"),
]

JobTest = pytest.mark.costly(reason="all that can happen to a job, in any order")(Job.TestCase)
JobTest.settings = examples(max_examples=40, stateful_step_count=12)


class LongJob(Job):
    """The same for longer."""


LongJobTest = pytest.mark.slow(LongJob.TestCase)
LongJobTest.settings = examples(max_examples=250, stateful_step_count=20)
