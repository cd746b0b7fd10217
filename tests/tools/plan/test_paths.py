"""What a device is charged for PyTorch's operations, against the operations that the engine starts.

Covers: selection, packing, decoding by the number of workers and the end of a window, on a CUDA device of fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.plans.policy import Aligned
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.tools.plan.paths import TorchOperations
from lightning_safusion.tools.plan.work import Span
from tests.cluster import settings, specs
from tests.cuda import Silent, fake_cuda, read_nothing

# Operations that start nothing on a device.
_FREE = ("empty", "prim::", "detach", "_local_scalar_dense", "_unsafe_view", "is_same_size")
_NUMEL = 1 << 18


class Counting(TorchDispatchMode):
    """Launches and bytes of the operations of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = ""
        self.launches: dict[str, int] = {}
        self.nbytes: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        given, made = ([t for t in tree_leaves(each) if isinstance(t, Tensor)] for each in ((args, kwargs), out))
        if func.is_view or name.startswith(_FREE) or not any(t.device.type == "cuda" for t in given + made):
            return out
        if name.startswith("_foreach") and name.endswith("_"):
            made = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)]
        # positions of what is not zero: counted, summed up, written
        several = name == "nonzero" or (name == "index" and any(t.dtype == torch.bool for t in given))
        self.launches[self.stage] = self.launches.get(self.stage, 0) + (3 if several else 1)
        self.nbytes[self.stage] = self.nbytes.get(self.stage, 0.0) + moved(name, given, made)
        return out


def moved(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    """Bytes that an operation reads and writes."""
    first, rest = (given[0], given[1:]) if given else (made[0], [])
    results = sum(t.nbytes for t in made)
    if name == "sort":  # by 8 bits of a key at a time, with positions
        return 2 * first.itemsize * (first.itemsize + 8) * first.numel()
    if name in ("index", "index_select", "gather"):
        return sum(t.nbytes for t in rest) + 2 * results
    if name.startswith(("scatter", "index_")):
        chosen = max((t.numel() for t in rest), default=0)
        return sum(t.nbytes for t in rest) + 2 * chosen * first.itemsize
    if name == "searchsorted":
        return given[1].nbytes + results
    if name in ("zero_", "fill_"):
        return first.nbytes
    if name == "copy_":
        return first.nbytes + given[1].nbytes
    return sum(t.nbytes for t in given) + results


STAGES: list[tuple[Any, str, str]] = [
    (Shipment, "fill", "selection"),
    (Shipment, "pack", "selection"),
    (Shipment, "launch", "selection"),
    (Shipment, "advance", "decoding"),
    (Shipment, "decode", "decoding"),
    (DeviceEnding, "_decode", "decoding"),
    (DeviceEnding, "_commit", "commitment"),
    (Shipment, "commit", "commitment"),
]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Hears which stage the engine is in."""
    counting = Counting()

    def staged(method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, counting.stage = counting.stage, stage
            try:
                return method(*args, **kwargs)
            finally:
                counting.stage = before

        return run

    for owner, name, stage in STAGES:
        monkeypatch.setattr(owner, name, staged(getattr(owner, name), stage))
    return counting


def window(engine: Engine, order: Sequence[int], grads: Sequence[Tensor]) -> None:
    for index in order:
        engine.push(index, grads[index])
    engine.drain()


@pytest.mark.parametrize(
    ("options", "few_bits", "workers", "buffers"),
    [
        ({}, False, 4, 1),
        ({"wire": "q4"}, True, 4, 1),
        ({"density": 0.01}, False, 1, 2),
        ({"scope": "group"}, False, 1, 2),
        ({"compressor": "gaussiank"}, False, 2, 1),
    ],
)
def test_a_window_of_operations(
    monkeypatch: pytest.MonkeyPatch,
    counting: Counting,
    options: dict[str, Any],
    few_bits: bool,
    workers: int,
    buffers: int,
) -> None:
    tensors, options = 4, {"density": 0.1, "compressor": "topk", "collective": "allgather"} | options
    read_nothing(monkeypatch)
    described = specs(((_NUMEL,),) * tensors)
    with fake_cuda(monkeypatch) as device:
        parts = settings(fusion=Aligned(tensors // buffers), **options)
        engine = build_engine(parts, described, Silent(workers), device, JobTraits(measure=False, deferred=True))
        grads = [torch.empty(_NUMEL, device=device) for _ in described]
        for _ in range(3):
            window(engine, range(tensors)[::-1], grads)
        with counting:
            window(engine, range(tensors)[::-1], grads)
    elements = _NUMEL * tensors / buffers
    span = Span(elements, elements * options["density"], tensors // buffers)
    path = TorchOperations(options["compressor"], few_bits)
    for stage, told in (
        ("selection", path.selection(span)),
        ("decoding", path.decoding(span, workers)),
        ("commitment", path.commitment(span)),
    ):
        work = told["operations"]
        assert counting.launches[stage] == pytest.approx(work.launches * buffers, rel=0.05, abs=2), stage
        assert counting.nbytes[stage] == pytest.approx(work.nbytes * buffers, rel=0.05), stage
