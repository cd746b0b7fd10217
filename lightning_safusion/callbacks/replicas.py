"""Whether all ranks hold the same model: checksums of named tensors, and a callback that compares those of ranks.

Checksums are equal where all bits are equal; they differ, up to chance, where bits differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_safusion.callbacks.base import StrategyCallback, check_every
from lightning_safusion.integration.parameters import managed
from lightning_safusion.lookup import check_name
from lightning_safusion.strategy import SAFusionStrategy

# Words of at most 32 bits: in sums modulo 2^64, two flipped sign bits of 64-bit words would cancel.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_CHUNK = 1 << 16  # words: what is computed of them stays in a cache
_SEED = 2718281828
_STEP = 6364136223846793005  # odd: the position of a chunk counts

Checksums = dict[str, tuple[tuple[int, ...], str, int]]
"""Of all tensors of one rank, by name: shape, dtype and checksum."""


class ReplicaConsistencyCheck(StrategyCallback):
    """Compares the parameters of all ranks bit by bit every few steps, and names the first tensor that differs.

    Data parallel ranks begin with equal parameters and apply equal updates. A rank that changes something by itself
    (code for rank 0 only, a random number, a faulty device) trains another model from then on, without any error. A
    check makes one pass over the tensors and reduces two numbers; more is sent only when they differ. It also runs
    once at the end of training.

    NaNs with equal bits are equal. Buffers are left out by default: DDP broadcasts rank 0's at the beginning of each
    forward pass, and the running statistics of BatchNorm differ in between. Tensors that DDP is configured to ignore
    are left out too. It logs nothing.

    Args:
        every_n_steps: Optimizer steps from one check to the next.
        optimizer_state: Also compare the state of the optimizers; not with one that is sharded over ranks.
        buffers: Also compare the buffers of the model.
        action: ``"raise"`` ends training on all ranks, ``"warn"`` continues it. ``"heal"`` warns, and copies the
            parameters, the buffers and the optimizers' state of rank 0 to all ranks, whatever is compared: bitwise
            equal replicas go on from there. Rank 0 may be the one that is wrong: look where the warning says. What DDP
            is told to ignore stays, and the state of a ``ZeroRedundancyOptimizer``, of which each rank has a part.

    Attributes:
        checks: Number of checks in this fit.

    Raises:
        ValueError: If ``every_n_steps`` is below 1 or there is no such ``action``.

    Example::

        Trainer(strategy="safusion", callbacks=[ReplicaConsistencyCheck(every_n_steps=500, optimizer_state=True)])
    """

    _purpose = "compares the replicas of"
    _serves = SAFusionStrategy

    def __init__(
        self,
        every_n_steps: int = 500,
        optimizer_state: bool = False,
        buffers: bool = False,
        action: Literal["raise", "warn", "heal"] = "raise",
    ) -> None:
        check_name("action", action, ("raise", "warn", "heal"))
        self.every_n_steps = check_every(every_n_steps)
        self.optimizer_state = optimizer_state
        self.buffers = buffers
        self.action = action
        self.checks = 0
        self._checked = 0  # step of the latest check

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checks, self._checked = 0, trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step // self.every_n_steps > self._checked // self.every_n_steps:
            self._check(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._checked:
            self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        self.checks += 1
        self._checked = trainer.global_step
        if trainer.world_size == 1:
            return
        tensors = dict(self._tensors(trainer, module))
        mine = checksums(tensors.items())
        number, device = digest(mine), trainer.strategy.root_device
        both = torch.tensor([number, -number], dtype=torch.int64, device=device)
        extremes = trainer.strategy.reduce(both, reduce_op="max")
        if not extremes.sum():  # the largest less the smallest number
            return
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, mine)
        difference = first_difference(everyone)
        distance = _distance(difference, tensors.get(difference.name), device)
        text = f"The replicas differ after step {trainer.global_step}: {_describe(difference, distance)}."
        if self.action == "raise":
            raise RuntimeError(text)
        if self.action == "heal":
            _heal(trainer, module)
            text += " Parameters, buffers and optimizer state of rank 0 have been copied to all ranks."
        rank_zero_warn(text)

    def _tensors(self, trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
        kept: dict[Tensor, str] = {param: name for name, param in managed(module)}
        for param, name in kept.items():
            yield f"parameter {name}", param
        if self.buffers:
            for name, buffer in _buffers(module):
                yield f"buffer {name}", buffer
        if self.optimizer_state:
            for place, optimizer in enumerate(trainer.optimizers):
                for param, state in optimizer.state.items():
                    if param in kept:
                        yield from _state(f"of {kept[param]} in optimizer {place}", state)


def _buffers(module: LightningModule) -> list[tuple[str, Tensor]]:
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]


@torch.no_grad()
def _heal(trainer: Trainer, module: LightningModule) -> None:
    """Copies what rank 0 has to all ranks. Collective."""
    device, params = trainer.strategy.root_device, managed(module)
    for _, tensor in [*params, *_buffers(module)]:
        tensor.copy_(_received(tensor, 0, device))
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            continue
        # tensors without their elements, which follow: a rank may lack some, or have others
        said: list[Any] = [[_outline(optimizer.state.get(param, {})) for _, param in params]]
        dist.broadcast_object_list(said, src=0, device=device)
        for (_, param), outline in zip(params, said[0], strict=True):
            _follow(optimizer, param, outline, device)


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _traits(value) if isinstance(value, Tensor) else value for key, value in state.items()}


class _Outline(NamedTuple):
    """Stands for a tensor in the state that rank 0 sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _traits(tensor: Tensor) -> _Outline:
    return _Outline(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _follow(optimizer: Optimizer, param: Tensor, outline: dict[str, Any], device: torch.device) -> None:
    """Makes the state of a parameter that of rank 0; tensors that fit stay where they are."""
    if not outline:
        optimizer.state.pop(param, None)
        return
    before, state = dict(optimizer.state.get(param, {})), {}
    for key, value in outline.items():
        own = before.get(key)
        if isinstance(value, _Outline):
            if not isinstance(own, Tensor) or _traits(own) != value:
                place = param.device if value.device == param.device.type else torch.device(value.device)
                own = torch.empty(value.shape, dtype=value.dtype, device=place)
            own.copy_(_received(own, 0, device))
        state[key] = own if isinstance(value, _Outline) else value
    optimizer.state[param] = state


def _received(mine: Tensor, source: int, device: torch.device) -> Tensor:
    """What another rank has in the place of a tensor, bit for bit. Collective."""
    flat = flat_reals(mine)
    sent = flat.view(torch.uint8).to(device, copy=True)  # bytes: not every backend sends every dtype
    if len(sent):
        dist.broadcast(sent, src=source)
    reals = sent.view(flat.dtype).to(mine.device)
    return (torch.view_as_complex(reals.view(-1, 2)) if mine.is_complex() else reals).view(mine.shape)


def _state(owner: str, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{key} {owner}", value
        elif isinstance(value, (int, float)):
            yield f"{key} {owner}", torch.tensor(value, dtype=torch.float64)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """int64 [_CHUNK] of odd numbers: a difference in a single word never vanishes."""
    generator = torch.Generator().manual_seed(_SEED)
    limits = torch.iinfo(torch.int64)
    return (torch.randint(limits.min, limits.max, (_CHUNK,), generator=generator) | 1).to(device)


def flat_reals(tensor: Tensor) -> Tensor:
    """The elements in logical order, complex ones as pairs; a view if they lie so in memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)


def checksum(tensor: Tensor) -> Tensor:
    """int64 scalar on the device of the tensor: sums modulo 2^64 of its words, weighted by position.

    Tensors of one shape and dtype have equal checksums if their bits are equal, NaNs included. Others collide with a
    probability below 2^-32; they never do if they differ in one word.
    """
    flat = flat_reals(tensor)
    words = flat.view(_WORDS[flat.itemsize])
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK) if len(words) else ():
        total = total * _STEP + (weights[: len(chunk)] * chunk).sum()
    return total


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> Checksums:
    """Those of named tensors; waits once for each device that they are on."""
    named = dict(tensors)
    values: dict[str, int] = {}
    for device in {tensor.device for tensor in named.values()}:
        there = {name: checksum(tensor) for name, tensor in named.items() if tensor.device == device}
        values |= zip(there, torch.stack(list(there.values())).tolist(), strict=True)
    return {name: (tuple(tensor.shape), str(tensor.dtype), values[name]) for name, tensor in named.items()}


def digest(sums: Checksums) -> int:
    """One number for all of them, their names, shapes and dtypes, whatever their order; from 0 to 2^56 - 1."""
    text = repr(sorted(sums.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Difference:
    """The first tensor that is not the same on all ranks."""

    name: str
    ranks: tuple[int, ...]  # that differ from the most common version, of equally common ones the first rank's
    others: tuple[int, ...]  # that have that version
    comparable: bool  # all ranks have it, in one shape and dtype
    count: int  # tensors that differ
    total: int  # tensors that were compared


def first_difference(ranks: Sequence[Checksums]) -> Difference:
    """Where ranks differ, from their checksums in rank order; raises if they do not."""
    names = list(dict.fromkeys(name for each in ranks for name in each))
    versions = {name: [each.get(name) for each in ranks] for name in names}
    differing = [name for name in names if len(set(versions[name])) > 1]
    if not differing:
        raise ValueError(f"the checksums of {len(ranks)} ranks are equal: compare their digests first")
    held = versions[differing[0]]
    common = max(held, key=held.count)
    different = tuple(rank for rank, version in enumerate(held) if version != common)
    others = tuple(rank for rank, version in enumerate(held) if version == common)
    comparable = None not in held and len({version[:2] for version in held if version is not None}) == 1
    return Difference(differing[0], different, others, comparable, len(differing), len(names))


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape and dtype; NaN where only one of them is NaN."""
    if not ours.numel():
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.detach().to(wide), theirs.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max())


def _distance(difference: Difference, mine: Tensor | None, device: torch.device) -> float | None:
    """Largest absolute difference from the common version, over all ranks; None if they cannot be compared."""
    if not difference.comparable or mine is None:
        return None
    distances: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(distances, largest_difference(mine, _received(mine, difference.others[0], device)))
    return float("nan") if any(value != value for value in distances) else max(distances)


def _describe(difference: Difference, distance: float | None) -> str:
    ranks, others = (", ".join(map(str, each)) for each in (difference.ranks, difference.others))
    text = f"{difference.name} on rank {ranks} is not that of rank {others}"
    text += " (missing, or of another shape or dtype)" if distance is None else f" (largest difference {distance:g})"
    return (
        f"{text}; {difference.count} of {difference.total} tensors differ. Look for code that changes the model on "
        "some ranks only, for random numbers in the update, and for parameters that DDP does not know"
    )
