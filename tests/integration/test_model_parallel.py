"""Lightning's ModelParallelStrategy with replicas, on four workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_safusion import OverlapProfiler, SAFusionModelParallelStrategy, SAFusionStrategy, attach
from tests.models import equal
from tests.process_group import run_ranks
from tests.resume import At, InGroup, run, saving

pytestmark = pytest.mark.filterwarnings("error:.*resumes with differences")  # every checkpoint is used in full

SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather"}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.down(self.up(x).relu())))
        return out


def batch(step: int, worker: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + worker))


class Sharded(LightningModule):
    """Every batch is a function of its number and of the worker among those that have data of their own."""

    def __init__(self, shards: bool = True) -> None:
        super().__init__()
        self.net, self.shards, self.batches = Layers(), shards, 0

    def configure_model(self) -> None:
        if self.shards:
            mesh = self.device_mesh
            assert mesh is not None
            if mesh["tensor_parallel"].size() > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(self.net, mesh["tensor_parallel"], plan)
            fully_shard(self.net.up, mesh=mesh["shard"])
            fully_shard(self.net, mesh=mesh["shard"])

    def training_step(self, batch_: Any, batch_idx: int) -> Tensor:
        worker = self.global_rank
        if self.shards:
            worker = self.trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        # steps that are repeated after a resume have the batches that they had
        number = (
            self.trainer.accumulate_grad_batches * self.global_step + batch_idx % self.trainer.accumulate_grad_batches
        )
        return self.net(batch(number, worker)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2, foreach=False)


def strategy(replicas: int, shards: int, parallel: int = 1, **options: Any) -> SAFusionModelParallelStrategy:
    made = SAFusionModelParallelStrategy(
        replicate_size=replicas, shard_size=shards, tensor_parallel_size=parallel, **(SPARSE | options)
    )
    made.cluster_environment = InGroup()
    return made


def replicated(**options: Any) -> SAFusionStrategy:
    return SAFusionStrategy(cluster_environment=InGroup(), **(SPARSE | options))


def local(module: nn.Module) -> list[Tensor]:
    return [each.to_local().clone() if hasattr(each, "to_local") else each.clone() for each in module.parameters()]


def full(module: nn.Module) -> list[Tensor]:
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in module.parameters()]


def test_it_is_the_training_of_plain_torch(tmp_path: Path) -> None:
    def by_hand(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = Layers()
        fully_shard(model.up, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
        handle = attach(model, optimizer, replicate_mesh=mesh["replicate"], **SPARSE)
        for step in range(6):
            optimizer.zero_grad()
            with handle.no_sync():
                (model(batch(2 * step, rank)).square().mean() / 2).backward()
            (model(batch(2 * step + 1, rank)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return local(model)

    def by_trainer(rank: int) -> tuple[list[Tensor], Any]:
        profiler = OverlapProfiler(every_n_steps=2, dirpath=tmp_path)
        job = run(strategy(2, 2), 6, profiler, model=Sharded(), accumulate_grad_batches=2, gradient_clip_val=0.1)
        return local(job.lightning_module), job.strategy.figures()  # type: ignore[attr-defined]

    theirs, ours = run_ranks(4, by_hand), run_ranks(4, by_trainer)
    assert all(equal(mine, other) for (mine, _), other in zip(ours, theirs, strict=True))
    assert ours[0][1]["windows"] == 6
    assert 0 < ours[0][1]["bytes_sent"] < ours[0][1]["dense_bytes"]
    assert json.loads((tmp_path / "overlap.json").read_text())["settings"]["replicate_size"] == "2"


@pytest.mark.slow
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    def job(rank: int) -> bool:
        path = tmp_path / "4.ckpt"
        whole = run(strategy(2, 2), 8, saving(path, 4), model=Sharded())
        again = run(strategy(2, 2), 8, model=Sharded(), ckpt=path)
        return equal(local(whole.lightning_module), local(again.lightning_module))

    assert run_ranks(4, job) == [True] * 4


@pytest.mark.slow
def test_an_interrupted_save_leaves_no_folder_that_passes_for_a_checkpoint(tmp_path: Path) -> None:
    """Lightning takes a folder for one if it has ``meta.pt``."""

    def job(rank: int) -> tuple[bool, bool]:
        path = tmp_path / "saved"
        trainer = run(strategy(2, 2), 2, saving(path, 2), model=Sharded())
        before = (path / "meta.pt").exists()
        dist.barrier()  # the first worker removes it soon
        trainer.strategy.attached[0].distributed_state_dict = interrupt  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            trainer.save_checkpoint(path)
        return before, (path / "meta.pt").exists()

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert run_ranks(4, job) == [(True, False)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_goes_to_other_meshes(distributed: bool, tmp_path: Path) -> None:
    """From two replicas of two shards to one of four, to two of one, to DDP, which goes on alike."""
    options = {"save_distributed_checkpoint": distributed}

    def first(rank: int) -> list[Tensor]:
        run(strategy(2, 2, **options), 4, saving(tmp_path / "4", 4), model=Sharded())
        return full(run(strategy(2, 2, **options), 6, model=Sharded(), ckpt=tmp_path / "4").lightning_module)

    def second(rank: int) -> list[Tensor]:
        made = strategy(1, 4, **options)
        return full(run(made, 6, saving(tmp_path / "6", 6), model=Sharded(), ckpt=tmp_path / "4").lightning_module)

    def third(rank: int) -> list[Tensor]:
        made = strategy(2, 1, save_distributed_checkpoint=False)
        return full(run(made, 8, saving(tmp_path / "8", 8), model=Sharded(), ckpt=tmp_path / "6").lightning_module)

    def last(rank: int) -> list[Tensor]:
        ends = []
        for made, sharded in ((strategy(2, 1, save_distributed_checkpoint=False), True), (replicated(), False)):
            ends.append(full(run(made, 10, model=Sharded(sharded), ckpt=tmp_path / "8").lightning_module))
        assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(*ends, strict=True))
        return ends[0]

    for work, workers in ((first, 4), (second, 4), (third, 2), (last, 2)):
        ends = run_ranks(workers, work)
        assert all(equal(end, ends[0]) for end in ends)


def test_a_checkpoint_of_ddp_is_resumed_sharded(tmp_path: Path) -> None:
    """Two workers of DDP, and two replicas of one shard, go on alike."""

    def job(rank: int) -> bool:
        path = tmp_path / "4.ckpt"
        whole = run(replicated(), 8, saving(path, 4), model=Sharded(False))
        again = run(strategy(2, 1), 8, model=Sharded(), ckpt=path)
        return all(map(torch.allclose, full(whole.lightning_module), full(again.lightning_module)))

    assert run_ranks(2, job) == [True] * 2


@pytest.mark.slow
def test_tensor_parallelism_inside() -> None:
    """Density 1 is DDP of as many replicas, also with clipping; at a low one all workers agree on what they share."""

    def job(rank: int) -> list[list[Tensor]]:
        ends = []
        for density in (1.0, 0.1):
            model = Sharded()
            run(strategy(2, 1, 2, density=density), 6, model=model, gradient_clip_val=0.1)
            ends.append(full(model))
        return ends

    def ddp(rank: int) -> list[Tensor]:
        model = Sharded(False)
        run(replicated(density=1.0, collective="auto"), 6, model=model, gradient_clip_val=0.1)
        return full(model)

    ends, reference = run_ranks(4, job), run_ranks(2, ddp)[0]
    for end in ends:
        assert equal(end, ends[0])
        assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(end[0], reference, strict=True))
        assert not equal(end[0], end[1])


class WithOther(Sharded):
    """Two sharded models."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Layers()

    def configure_model(self) -> None:
        super().configure_model()
        assert self.device_mesh is not None
        fully_shard(self.other, mesh=self.device_mesh["shard"])


class TakingTurns(WithOther):
    """Each has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch_: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for model, optimizer in zip((self.net, self.other), optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(model(batch(batch_idx, self.global_rank)).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(model.parameters()) for model in (self.net, self.other)]


@pytest.mark.slow
def test_several_sharded_models() -> None:
    def job(rank: int) -> tuple[list[Tensor], list[int]]:
        model = TakingTurns()
        made = strategy(2, 2)
        run(made, 8, model=model)
        each = [attached.figures() for attached in made.attached]
        assert made.figures()["dense_bytes"] == sum(figures["dense_bytes"] for figures in each)
        return full(model), [figures["windows"] for figures in each]

    ends = run_ranks(4, job)
    assert all(equal(end, ends[0][0]) for end, _ in ends)
    assert ends[0][1] == [4, 4]


@pytest.mark.slow
def test_fits_follow_each_other(tmp_path: Path) -> None:
    """One model in fits of several strategies, of which one averages in bf16; one may still be saved after its end."""

    def job(rank: int) -> tuple[list[Tensor], list[Any]]:
        model, figures = Sharded(), []
        learned: Any = []
        for number, options in enumerate(
            [SPARSE, {"system": "hsdp-bf16", "density": None, "collective": None}, SPARSE]
        ):
            made = strategy(2, 2, **options)
            made.begin_with(learned if number > 1 else [])
            job = run(made, 4, At(4, lambda trainer: learned.extend(trainer.strategy.learned())), model=model)  # type: ignore[attr-defined]
            figures.append(made.figures())
            model.configure_model = lambda: None  # type: ignore[method-assign]
        job.save_checkpoint(tmp_path / "ended")
        return full(model), figures

    ends = run_ranks(4, job)
    assert (tmp_path / "ended" / "safusion" / ".metadata").exists()
    assert all(equal(end, ends[0][0]) for end, _ in ends)
    first, dense, last = ends[0][1]
    assert [first["windows"], dense["windows"], last["windows"]] == [4, 0, 8]
    assert dense["plain_ddp"] == "system='ddp-bf16' asks for it"


class Unseeded(Sharded):
    def __init__(self) -> None:
        super().__init__()
        for param in self.net.parameters():
            param.data.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
        self.register_buffer("scale", torch.full((3,), float(dist.get_rank())))


def test_workers_need_not_be_seeded_alike() -> None:
    def job(rank: int) -> list[Tensor]:
        model = Unseeded()
        run(strategy(2, 1, 2), 2, model=model)
        return [*full(model), *model.buffers()]

    ends = run_ranks(4, job)
    assert all(equal(end, ends[0]) for end in ends)


class Scaled(MixedPrecision):
    """Scales the loss, and nothing else."""

    def __init__(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        super().__init__("16-mixed", "cpu", scaler=scaler)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        yield


def test_a_loss_scaler_changes_nothing() -> None:
    """Its factor grows, and residuals are held without it."""

    def job(rank: int) -> tuple[bool, float]:
        plain = local(run(strategy(2, 1), 6, model=Sharded()).lightning_module)
        scaled = run(strategy(2, 1), 6, model=Sharded(), plugins=[precision := Scaled()])
        assert precision.scaler is not None
        return equal(plain, local(scaled.lightning_module)), precision.scaler.get_scale()

    assert run_ranks(2, job) == [(True, 32.0)] * 2


class Later(WithOther):
    """A layer of the first, and the other one, are trained from the second epoch on."""

    def training_step(self, batch_: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch_, batch_idx)
        return loss + self.other(batch(batch_idx, self.global_rank)).square().mean() if self.current_epoch else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], 1e-2)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.down, pl_module.other])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.net.down, pl_module.other], optimizer)


def test_parameters_that_are_trained_later() -> None:
    def job(rank: int) -> tuple[list[Tensor], bool, list[int]]:
        model, made = Later(), strategy(2, 2)
        run(made, 8, Thaw(), model=model)
        moved = equal(
            [*full(model.net.down), *full(model.other)], [*Layers().down.parameters(), *Layers().parameters()]
        )
        return full(model), not moved, [each.figures()["windows"] for each in made.attached]

    ends = run_ranks(4, job)
    assert all(equal(end, ends[0][0]) for end, *_ in ends)
    assert ends[0][1:] == (True, [8, 2])


def test_residuals_that_were_not_written_to_the_end_are_named(tmp_path: Path) -> None:
    def job(rank: int) -> int:
        run(strategy(2, 1), 2, saving(tmp_path / "2", 2), model=Sharded())
        if rank == 0:
            (tmp_path / "2" / "safusion" / ".metadata").unlink()
            with pytest.warns(UserWarning, match="was not written to its end"):
                return run(strategy(2, 1), 4, model=Sharded(), ckpt=tmp_path / "2").global_step
        return run(strategy(2, 1), 4, model=Sharded(), ckpt=tmp_path / "2").global_step

    assert run_ranks(2, job) == [4, 4]


class Half(Sharded):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net.up, mesh=self.device_mesh["shard"])


class Whole(Sharded):
    def configure_model(self) -> None:
        fully_shard(self.net)


def test_what_is_refused() -> None:
    def job(rank: int) -> list[str]:
        said = []
        for sizes, model in (((2, 2), Half()), ((2, 2), Whole()), ((3, 1), Sharded()), ((0, 4), Sharded())):
            with pytest.raises((MisconfigurationException, ValueError)) as raised:
                run(strategy(*sizes), 1, model=model)
            said.append(str(raised.value))
        return said

    for half, whole, sizes, none in run_ranks(4, job):
        assert "nothing averages the gradients of net.down.weight" in half
        assert "are both among the shards of up.weight" in whole
        assert "multiply to 3, and there are 4 workers" in sizes
        assert "1 or more, got replicate_size=0" in none
