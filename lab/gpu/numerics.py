"""Numbers of the device against those of the CPU, bit for bit: messages, means and residuals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lab.gpu.buffers import DECAY, DEVICE, Case, Rank, gather
from lab.gpu.compiled import Compiled, registers
from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal
from lab.gpu.jobs import DENSITY, Echo, Job, described, middle_shapes, shapes_of
from lab.gpu.stages import Setting
from lightning_safusion.kernels.cuda import launch
from lightning_safusion.kernels.cuda.window import WindowKernels

_SIZES = (3000, 1, 40, 2049, 700)
#: Buffers, and the kinds of their second moments, where elements are compared by update.
CASES: dict[str, tuple[Case, list[int] | None]] = {
    "normal numbers": (Case(_SIZES), None),
    "keys in units of the update": (Case(_SIZES), [0] * 5),
    "moments of 16 bits, and none": (Case(_SIZES), [1, 2, -1, 0, 1]),
    "pooled quotas": (Case(_SIZES, pooled=True), None),
    "ties": (Case(_SIZES, values="ties"), None),
    "zeros": (Case(_SIZES, values="zeros", pooled=True), None),
    "all equal": (Case(_SIZES, values="one"), None),
    "subnormal numbers": (Case(_SIZES, values="subnormal"), [0] * 5),
    "bf16 and fp16 gradients": (Case(_SIZES, kinds=(1, 0, 2, 1, 2)), None),
    "dense tensors": (Case(_SIZES, dense=frozenset({1, 3}), kinds=(0, 1, 0, 0, 2)), None),
    "low density": (Case((40_000, 300), density=0.003), [0, 0]),
}
_REPEATS, _COPIES = 20, 32
#: Elements of the largest buffer with a reference, and of one of more than 2^31 bytes.
_REFERENCED, _LARGE = 20_000_000, 600_000_000


def cases(rehearse: bool) -> dict[str, tuple[Case, list[int] | None]]:
    """:data:`CASES`; in a rehearsal of tensors an eighth as long."""
    if not rehearse:
        return CASES
    shorter = {name: tuple(-(-size // 8) for size in case.sizes) for name, (case, _) in CASES.items()}
    return {name: (replace(case, sizes=shorter[name]), moments) for name, (case, moments) in CASES.items()}


def same(first: Tensor, second: Tensor) -> bool:
    """Whether all bits are, those of NaN and of zeros too."""
    ours, theirs = first.cpu().view(torch.uint8), second.cpu().view(torch.uint8)
    return torch.equal(ours, theirs)


def _differs(names: list[str]) -> str:
    return "" if not names else f"differs: {', '.join(names)}"


def against_the_cpu(case: Case, seed: int, moments: list[int] | None) -> list[str]:
    """What differs of a window of some ranks: messages, means or residuals of the first."""
    ranks, wrong = [Rank.of(case, number, seed, moments) for number in range(case.world_size)], []
    for rank in ranks:
        accumulated, keys = rank.expected()
        message = rank.message(accumulated, keys).clone()
        if not same(rank.run(), message):
            wrong.append(f"message of rank {rank.number}")
        if not same(rank.memory, accumulated):
            wrong.append(f"sum of rank {rank.number}")
    gather(ranks)
    rank, window = ranks[0], WindowKernels(DEVICE)
    mean = rank.mean()
    held, left = rank.held(mean), rank.left(mean)
    rank.kernels.decode(DECAY, window.status)
    if int(window.status) != 0:
        wrong.append("status")
    if not same(torch.cat([grad.float() for grad in rank.grads]), held):
        wrong.append("mean")
    window.commit([rank.kernels])
    if not same(rank.memory, left):
        wrong.append("residual")
    return wrong


def _several(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sizes of a model's tensors, so many that the host makes a reference of them in a few seconds."""
    sizes, total = list[int](), 0
    for size in map(math.prod, shapes):
        if total + size <= _REFERENCED:
            sizes.append(size)
            total += size
    return tuple(sizes)


def _drawn_there(case: Case) -> Rank:
    """A rank whose numbers the device itself has drawn."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    memory, flat = (torch.randn(sum(case.sizes), device=DEVICE, generator=generator) for _ in range(2))
    return Rank.holding(case, 0, memory, list(flat.split(case.sizes)))


def _repeats(rank: Rank, times: int) -> list[str]:
    """Which runs over the same numbers write other bytes than the first."""
    memory = rank.memory.clone()
    first, wrong = rank.run().clone(), []
    for turn in range(1, times):
        rank.memory.copy_(memory)
        if not torch.equal(rank.run(), first):
            wrong.append(f"run {turn}")
    return wrong


def _copies(case: Case) -> list[str]:
    """Whether the mean of many copies of a message is that of the CPU."""
    rank = Rank.of(case, 0, 6)
    message = rank.run()
    rank.kernels.received.view(case.world_size, -1).copy_(message.expand(case.world_size, -1))
    rank.exchange.messages[1].copy_(rank.kernels.received.cpu())
    held, window = rank.held(rank.mean()), WindowKernels(DEVICE)
    rank.kernels.decode(DECAY, window.status)
    return [] if same(torch.cat([grad.float() for grad in rank.grads]), held) else ["mean"]


def _bad(value: float) -> list[str]:
    """What is wrong with a window in which one element is not finite."""
    ranks, wrong = [Rank.of(Case((2100, 800)), number, 8) for number in range(2)], []
    before = ranks[1].memory.clone()
    ranks[1].grads[0][5:6].fill_(value)
    for rank in ranks:
        rank.run()
    gather(ranks)
    kept = ranks[1].memory[2100:].clone()
    for rank in ranks:
        window = WindowKernels(DEVICE)
        rank.kernels.decode(DECAY, window.status)
        if [bool(grad.isfinite().all()) for grad in rank.grads] != [False, True]:
            wrong.append(f"means of rank {rank.number}")
        window.commit([rank.kernels])
    if not torch.equal(ranks[1].memory[2100:], kept):
        wrong.append("neighbour's residual")
    if not torch.allclose(ranks[1].memory[:2100], before[:2100], rtol=1e-5, atol=1e-6):
        wrong.append("its own residual")
    return wrong


def engines(place: Device, windows: int, **given: Any) -> list[str]:
    """What differs of whole windows of an engine on the device and of one on the CPU, with other workers' echoes."""
    dtype, by_update = given.pop("dtype", torch.float32), given.pop("by_update", True)
    specs = described(middle_shapes(not place.cuda), dtype)
    ours = Job(place, specs, Echo(4), by_update=by_update, **given)
    theirs = Job(Device(rehearse=True), specs, Echo(4), deferred=False, by_update=by_update, **given)
    wrong = []
    for step in range(windows):
        for job in (ours, theirs):
            job.draw(step)
            job.window()
        if not same(ours.means(), theirs.means()):
            wrong.append(f"means of window {step}")
        if not same(ours.residual(), theirs.residual()):
            wrong.append(f"residual of window {step}")
    return wrong


def numerics(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place = Device(setting.rehearse)
    known = cases(setting.rehearse)
    with patch.object(launch, "launch", Compiled()) as compiled:
        for name, (case, moments) in known.items():
            yield equal(
                f"messages, means, residuals: {name}", not (wrong := against_the_cpu(case, 3, moments)), _differs(wrong)
            )
    yield from registers(compiled)
    for value in (math.nan, math.inf):
        yield equal(f"a gradient with {value}", not (wrong := _bad(value)), _differs(wrong))
    sizes = _several(shapes_of(setting.rehearse))
    wrong = against_the_cpu(Case(sizes, world_size=1), 4, None)
    yield equal("messages, means, residuals: many tensors in one buffer", not wrong, _differs(wrong))
    repeats, copies = (3, 4) if setting.rehearse else (_REPEATS, _COPIES)
    normal, _ = known["normal numbers"]
    rank = Rank.of(normal, 0, 5, [0] * len(normal.sizes))
    yield equal(f"{repeats} runs write the same bytes", not (wrong := _repeats(rank, repeats)), _differs(wrong))
    large = 5000 if setting.rehearse else _LARGE
    wrong = _repeats(_drawn_there(Case((large,), density=DENSITY, world_size=1)), 2)
    about = _differs(wrong) or f"{large:,} elements; no reference"
    yield equal("2 runs over a tensor of more than 2^31 bytes write the same bytes", not wrong, about)
    wrong = _copies(replace(normal, world_size=copies))
    yield equal(f"mean of {copies} copies of a message", not wrong, _differs(wrong))
    jobs: dict[str, dict[str, Any]] = {
        "default": {},
        "pooled quotas": {"quota": "pooled", "by_update": False, "memory": "residual"},
        # with a decay, PyTorch's own sum on the CPU would round once where the kernels round twice
        "bf16 gradients": {"dtype": torch.bfloat16, "memory": "residual"},
    }
    for name, given in jobs.items():
        wrong = engines(place, 3, **given)
        yield equal(f"windows of an engine: {name}", not wrong, _differs(wrong))
