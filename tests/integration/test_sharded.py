"""The exchange between the replicas of a model that FSDP2 shards: two of two workers each."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import Attached, attach
from lightning_safusion.fusion.state import local_state
from lightning_safusion.integration import attached as attaching
from lightning_safusion.integration.checkpoint.distributed import gathered
from lightning_safusion.integration.exchange import Choice, Mode
from tests.models import equal
from tests.process_group import run_ranks

SPARSE: dict[str, Any] = {"density": 0.05, "collective": "allgather"}
#: The engine sends everything: a mean of both replicas, as an all-reduce has it.
WHOLE: dict[str, Any] = {"compressor": "none", "density": 1.0, "memory": "none", "fusion": "wfbp", "wire": "fp32"}
BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
BF16_WIDE: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


class Blocks(nn.Module):
    """Rows that do not divide by the shards, a parameter of the root, one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(13, 33), nn.LayerNorm(33), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(33, 17), nn.Tanh())
        self.last = nn.Linear(17, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        hidden = nn.functional.pad(x, (0, 20)) if short else self.first(x)
        out: Tensor = self.last(self.second(hidden)) * self.scale
        return out


def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, checkpoints: bool = False, compiles: bool = False, **options: Any) -> Any:
    model = Blocks()
    if checkpoints:  # activations are computed again
        model.first, model.second = checkpoint_wrapper(model.first), checkpoint_wrapper(model.second)
    for part in (model.first, model.second):
        if compiles:
            part.compile(backend="aot_eager")
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Loop:
    """A training on one of four workers; ``native``: FSDP2 averages over the replicas as well."""

    def __init__(self, native: bool = False, options: dict[str, Any] | None = None, **parts: Any) -> None:
        torch.use_deterministic_algorithms(True)
        mesh = meshes()
        self.native, self.model = native, sharded(mesh if native else mesh["shard"], **(options or {}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False)
        self.handle: Attached | None = None
        if parts is WHOLE or parts == WHOLE:  # which would be left to an all-reduce
            attaching.choose = lambda *_: Choice(Mode.ENGINE)  # type: ignore[assignment]
        if not native:
            self.handle = attach(self.model, self.optimizer, replicate_mesh=mesh["replicate"], **parts)

    def backward(self, x: Tensor, last: bool = True) -> None:
        if self.native:
            self.model.set_requires_all_reduce(last)
        held = nullcontext() if self.handle is None or last else self.handle.no_sync()
        with held:
            self.model(x).float().square().mean().backward()

    def step(self, rank: int, number: int, together: int = 1, clip: bool = False) -> None:
        self.optimizer.zero_grad()
        for part in range(together):
            generator = torch.Generator().manual_seed(1000 * number + 10 * part + rank)
            self.backward(torch.randn(6, 13, generator=generator), last=part == together - 1)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()

    @property
    def weights(self) -> list[Tensor]:
        return [param.to_local().detach().clone() for param in self.model.parameters()]


def pair(rank: int, parts: dict[str, Any], options: dict[str, Any], **step: Any) -> bool:
    """Whether a training ends as the native one does."""
    ends = []
    for native in (True, False):
        loop = Loop(native, options, **({} if native else parts))
        for number in range(6):
            loop.step(rank, number, **step)
        ends.append(loop.weights)
        if loop.handle is not None and parts == WHOLE:
            assert loop.handle.figures()["windows"] == 6
    return equal(*ends)


@pytest.mark.parametrize(
    ("parts", "options", "step"),
    [
        pytest.param({"density": 1.0}, BF16, {"together": 3, "clip": True}, marks=pytest.mark.slow),
        (WHOLE, {}, {"together": 3, "clip": True}),
        pytest.param(WHOLE, BF16_WIDE, {}, marks=pytest.mark.slow),
        pytest.param(WHOLE, BF16, {"together": 3}, marks=pytest.mark.slow),
    ],
    ids=["dense", "fp32", "reduced in fp32", "bf16"],
)
def test_density_one_is_that_of_a_mesh_of_two_dimensions(
    parts: dict[str, Any], options: dict[str, Any], step: dict[str, Any]
) -> None:
    assert run_ranks(4, lambda rank: pair(rank, parts, options, **step)) == [True] * 4


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_nothing_is_written_too_late(
    compute: torch.dtype,
    reduce: torch.dtype,
    offload: bool,
    reshard: bool,
    together: int,
    kept: bool,
    checkpoints: bool,
    compiles: bool,
) -> None:
    """The engine sends everything, and the gradients are those of FSDP2, whatever they are made of."""
    import_module("torch._dynamo")  # once, for all processes
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)}
    options |= {"checkpoints": checkpoints, "compiles": compiles}
    options |= {"reshard_after_forward": reshard} | ({"offload_policy": CPUOffloadPolicy(False)} if offload else {})

    def run(rank: int) -> bool:
        ends = []
        for native in (True, False):
            loop = Loop(native, options, **({} if native else WHOLE))
            for number in range(3):
                loop.optimizer.zero_grad(set_to_none=not kept)
                for part in range(together):
                    x = torch.randn(6, 13, generator=torch.Generator().manual_seed(100 * number + 10 * part + rank))
                    loop.backward(x, last=True)  # gradients are added up after each exchange
            ends.append([param.grad.to_local().clone() for param in loop.model.parameters()])
        if reduce is torch.float16:  # which FSDP2 divides by another factor before it sums, and after
            return all(torch.allclose(ours, theirs, 1e-2, 1e-5) for theirs, ours in zip(*ends, strict=True))
        return equal(*ends)

    assert run_ranks(4, run) == [True] * 4


def test_replicas_are_equal_at_a_low_density() -> None:
    def run(rank: int) -> tuple[list[Tensor], Any, bool]:
        loop = Loop(**SPARSE)
        for number in range(8):
            loop.step(rank, number, together=1 + number % 2)
        assert loop.handle is not None
        assert loop.handle.engine is not None
        moments: Any = loop.handle.engine.space.selector.units
        return loop.weights, loop.handle.figures(), None not in moments.moments(range(7))

    (first, figures, _), (second, _, _), (third, _, _), (fourth, _, _) = ends = run_ranks(4, run)
    assert equal(first, third)
    assert equal(second, fourth)
    assert figures["windows"] == 8
    assert 0 < figures["bytes_sent"] < 0.6 * figures["dense_bytes"]
    assert all(known for _, _, known in ends)


def test_a_distributed_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(rank: int) -> bool:
        loop = Loop(**SPARSE)
        for number in range(4):
            loop.step(rank, number)
        assert loop.handle is not None
        dcp.save({"safusion": loop.handle.distributed_state_dict()}, checkpoint_id=tmp_path)
        again = Loop(**SPARSE)
        again.model.load_state_dict(loop.model.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
        assert again.handle is not None
        again.handle.load_distributed(tmp_path)
        for number in range(4, 8):
            loop.step(rank, number)
            again.step(rank, number)
        return equal(loop.weights, again.weights)

    assert run_ranks(4, run) == [True] * 4


def held(handle: Attached) -> Tensor:
    """The mean of the residuals of all replicas, of all parameters in full."""
    assert handle.engine is not None
    memory = gathered(local_state(handle.engine)["memory"], handle._model)["residual"]
    mean = torch.cat([memory[name].flatten() for name in sorted(memory)])
    dist.all_reduce(mean, group=handle._model.group)
    return mean / dist.get_world_size(handle._model.group)


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_residuals_go_to_other_meshes(distributed: bool, tmp_path: Path) -> None:
    """From two replicas of two shards to one of four, to two of one, to DDP: their mean stays what it was."""

    def save(rank: int, handle: Attached, path: Path) -> None:
        if distributed:
            dcp.save({"safusion": handle.distributed_state_dict()}, checkpoint_id=path)
        elif (state := handle.state_dict()) and rank == 0:
            torch.save(state, path)
        dist.barrier()

    def begin(rank: int) -> Tensor:
        loop = Loop(**SPARSE)
        for number in range(4):
            loop.step(rank, number)
        assert loop.handle is not None
        save(rank, loop.handle, tmp_path / "0")
        return held(loop.handle)

    def go_on(rank: int, shape: tuple[int, ...], number: int) -> Tensor:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[: len(shape)])
        model = sharded(mesh["shard"]) if len(shape) > 1 else DistributedDataParallel(Blocks())
        replicas = {"replicate_mesh": mesh["replicate"]} if len(shape) > 1 else {}
        handle = attach(model, torch.optim.AdamW(model.parameters()), **replicas, **SPARSE)
        path = tmp_path / f"{number}"
        if distributed:
            handle.load_distributed(path)
        else:
            handle.load_state_dict(torch.load(path, weights_only=True))
        save(rank, handle, tmp_path / f"{number + 1}")
        return held(handle)

    first = run_ranks(4, begin)[0]
    assert first.abs().sum() > 0
    for number, shape in enumerate([(1, 4), (2, 1), (2,)]):
        for mean in run_ranks(4 if number == 0 else 2, go_on, shape, number):
            torch.testing.assert_close(mean, first, rtol=1e-6, atol=1e-9)


def test_files_that_are_lost_or_cut(tmp_path: Path) -> None:
    """Of one shard: all workers raise, or say that residuals are lost."""

    def run(rank: int) -> tuple[str, list[str]]:
        loop = Loop(**SPARSE)
        loop.step(rank, 0)
        handle = loop.handle
        assert handle is not None
        dcp.save({"safusion": handle.distributed_state_dict()}, checkpoint_id=tmp_path)
        if rank == 0:
            (tmp_path / "__3_0.distcp").write_bytes(b"cut")
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle.load_distributed(tmp_path)
        if rank == 0:
            (tmp_path / "__1_0.distcp").unlink()
        dist.barrier()
        with pytest.raises(ValueError, match="delete this folder") as raised:
            handle.load_distributed(tmp_path)
        return str(raised.value), [str(each.message) for each in caught if "differences" in str(each.message)]

    ends = run_ranks(4, run)
    assert all("is damaged (OSError" in said for said, _ in ends)
    assert all("is lost" in note for _, (note,) in ends)


def test_shards_of_other_sizes_decide_alike(tmp_path: Path) -> None:
    """One has all rows and would gain by selection, the other has none: both are saved, in one file and in several."""

    def run(rank: int) -> tuple[bool, bool]:
        mesh, model = meshes(), nn.Linear(4000, 1, bias=False)
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters())
        handle = attach(model, optimizer, replicate_mesh=mesh["replicate"], density=0.01)
        model(torch.randn(2, 4000, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        optimizer.step()
        dcp.save({"safusion": handle.distributed_state_dict()}, checkpoint_id=tmp_path)
        return handle.engine is not None, bool(handle.state_dict())

    ends = run_ranks(4, run)
    assert all(exchanged for exchanged, _ in ends)
    assert ends[0][1]


def test_replicas_begin_alike() -> None:
    def run(rank: int) -> list[Tensor]:
        mesh, model = meshes(), Blocks()
        model.scale.data.fill_(rank)
        fully_shard(model, mesh=mesh["shard"])
        attach(model, torch.optim.AdamW(model.parameters()), replicate_mesh=mesh["replicate"], **SPARSE)
        return [param.full_tensor().detach() for param in model.parameters()]

    ends = run_ranks(4, run)
    assert all(equal(end, ends[0]) for end in ends)


def test_frozen_parameters_and_those_of_no_optimizer() -> None:
    def run(rank: int) -> list[bool]:
        ends = []
        for native in (True, False):
            attaching.choose = lambda *_: Choice(Mode.ENGINE)  # type: ignore[assignment]
            mesh = meshes()
            model = sharded(mesh if native else mesh["shard"])
            model.second.requires_grad_(False)
            optimizer = torch.optim.SGD(model.first.parameters(), 0.1)
            handle = None if native else attach(model, optimizer, replicate_mesh=mesh["replicate"], **WHOLE)
            for number in range(4):
                if number == 2:
                    model.second.requires_grad_(True)
                    optimizer.add_param_group({"params": [*model.second.parameters()]})
                    if handle is not None:
                        handle.bind([optimizer])
                optimizer.zero_grad()
                x = torch.randn(6, 13, generator=torch.Generator().manual_seed(10 * number + rank))
                model(x).square().mean().backward()
                optimizer.step()
            ends.append([param.grad.to_local() for param in model.parameters()])
            ends.append([param.to_local() for param in model.parameters()])
        return [equal(ends[0], ends[2]), equal(ends[1], ends[3])]

    assert run_ranks(4, run) == [[True, True]] * 4


@pytest.mark.parametrize("reshards", [True, False])
def test_optimizers_are_found_when_they_step(reshards: bool) -> None:
    """Between the steps, where parameters may be whole."""

    def run(rank: int) -> tuple[list[Tensor], Any]:
        loop = Loop(native=True)
        mesh = meshes()
        loop.native, loop.model = False, sharded(mesh["shard"])
        loop.model.set_reshard_after_backward(reshards)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), 1e-2)
        loop.handle = attach(loop.model, replicate_mesh=mesh["replicate"], **SPARSE)
        for number in range(4):
            loop.step(rank, number)
        for part in (loop.model.first, loop.model.second, loop.model):
            part.reshard()
        return loop.weights, loop.handle.figures()["windows"]

    (first, windows), (second, _), (third, _), (fourth, _) = run_ranks(4, run)
    assert windows == 3
    assert equal(first, third)
    assert equal(second, fourth)


def test_a_part_of_the_gradients_is_refused() -> None:
    """Frozen parameters that are trained again, without bind; a pass without some parameters, before another one."""

    def run(rank: int) -> list[str]:
        mesh, said = meshes(), []
        x = torch.randn(6, 13, generator=torch.Generator().manual_seed(rank))
        for frozen in (True, False):
            model = sharded(mesh["shard"])
            model.first.requires_grad_(not frozen)
            optimizer = torch.optim.AdamW(model.parameters())
            attach(model, optimizer, replicate_mesh=mesh["replicate"], **SPARSE)
            model(x).square().mean().backward()
            optimizer.step()
            model.first.requires_grad_(True)
            if not frozen:
                model(x, short=True).sum().backward()
            loss = model(x).square().mean()
            with pytest.raises(RuntimeError) as raised:
                loss.backward()
            said.append(str(raised.value))
        return said

    for unfrozen, twice in run_ranks(4, run):
        assert "frozen or unfrozen: first.0.weight" in unfrozen
        assert "came twice before the exchange has ended, and there were none of first.0.weight" in twice


def test_optimizers_that_step_in_the_backward_pass_are_refused() -> None:
    def run(rank: int) -> str:
        loop = Loop(**SPARSE)
        loop.model.scale.register_post_accumulate_grad_hook(lambda param: None)
        with pytest.raises(RuntimeError) as raised:
            loop.step(rank, 0)
        return str(raised.value)

    assert all("would see its gradient before it is exchanged" in said for said in run_ranks(4, run))


def test_what_is_refused() -> None:
    def run(rank: int) -> list[str]:
        mesh = meshes()
        shards, whole = sharded(mesh["shard"]), sharded(mesh)
        one = FullyShardedDataParallel(Blocks(), process_group=mesh["shard"].get_group(), device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(shards.parameters())
        wrong: list[tuple[Any, Any]] = [
            (shards, None),
            (shards, mesh),
            (shards, mesh.get_group("replicate")),
            (Blocks(), mesh["replicate"]),
            (whole, mesh["replicate"]),
            (one, mesh["replicate"]),
            (DistributedDataParallel(Blocks()), mesh["replicate"]),
        ]
        said = []
        for model, replicas in wrong:
            with pytest.raises((TypeError, ValueError)) as raised:
                attach(model, optimizer, replicate_mesh=replicas)
            said.append(str(raised.value))
        attach(shards, optimizer, replicate_mesh=mesh["replicate"], **SPARSE)
        with pytest.raises(RuntimeError, match="attached already"):
            attach(shards, optimizer, replicate_mesh=mesh["replicate"], **SPARSE)
        shards.first(torch.ones(2, 13)).sum().backward()
        with pytest.raises(RuntimeError) as missing:
            optimizer.step()
        return [*said, str(missing.value)]

    for said in run_ranks(4, run):
        for text, expected in zip(
            said,
            [
                "needs replicate_mesh, the dimension of its replicas",
                "replicate_mesh has one dimension, mesh['replicate'], got 2",
                "replicate_mesh is a DeviceMesh, such as mesh['replicate'], got ProcessGroup",
                "and Blocks is none: call fully_shard(model, mesh=mesh['shard']) after its layers",
                "give fully_shard mesh['shard'] alone",
                "does not serve FullyShardedDataParallel (FSDP1): shard the model with fully_shard",
                "replicate_mesh is for models that fully_shard has sharded",
                "got no gradient in this backward pass: ",
            ],
            strict=True,
        ):
            assert expected in text


def test_a_part_of_a_model_is_refused() -> None:
    """Nothing would average the rest; which is the root FSDP2 knows after a forward pass, here of an evaluation."""

    def run(rank: int) -> None:
        mesh, x, said = meshes(), torch.ones(2, 13), r"'first' \(Sequential\) is a part of a model that fully_shard has"
        for known in (False, True):
            model = sharded(mesh["shard"])
            if known:
                with torch.no_grad():
                    model(x)
            with pytest.raises(ValueError, match=said):  # noqa: PT012 (in one of the two)
                attach(model.first, torch.optim.SGD(model.parameters()), replicate_mesh=mesh["replicate"], **SPARSE)
                model(x)

    run_ranks(4, run)
