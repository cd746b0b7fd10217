"""A model that FSDP2 shards inside of a machine and that is exchanged sparse between machines. It resumes.

torchrun --nproc-per-node 4 sharded.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_safusion

EPOCHS, CHECKPOINTS = 5, Path("sharded")
REPLICAS = 2  # as many as there are machines; here two halves of one


def points(count: int) -> TensorDataset:
    """Pairs of points (float32 [4]), and whether they lie in the same quadrant (0.0 or 1.0)."""
    pairs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pairs, ((pairs[:, :2] > 0) == (pairs[:, 2:] > 0)).all(dim=1).float())


def main() -> None:
    """Trains on the processes that torchrun has started."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = REPLICAS, dist.get_world_size() // REPLICAS
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
    ).to(device)
    fully_shard(model[3], mesh=mesh["shard"])  # not the whole mesh: FSDP2 would average between machines itself
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    handle = lightning_safusion.attach(model, optimizer, replicate_mesh=mesh["replicate"], collective="allgather")

    sampler: DistributedSampler[object] = DistributedSampler(data := points(8192))
    first = 0
    if finished := sorted(CHECKPOINTS.glob("epoch_*")):
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=finished[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        handle.load_distributed(finished[-1])  # the residuals, also on another mesh
        first = int(finished[-1].name.removeprefix("epoch_")) + 1
        if dist.get_rank() == 0:
            print(f"goes on after epoch {first - 1}", flush=True)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        hits = 0.0
        for x, y in DataLoader(data, batch_size=64, sampler=sampler):
            logits = model(x.to(device)).squeeze(1)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, y.to(device)).backward()
            optimizer.step()
            hits += float(((logits > 0) == (y.to(device) > 0.5)).float().sum())
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "safusion": handle.distributed_state_dict()}
        dcp.save(state, checkpoint_id=CHECKPOINTS / "unfinished")
        if dist.get_rank() == 0:
            (CHECKPOINTS / "unfinished").rename(CHECKPOINTS / f"epoch_{epoch:03}")
            figures = handle.figures()
            print(f"epoch {epoch}: accuracy {hits / len(sampler):.3f},", end=" ")
            print(f"{figures['bytes_sent']} bytes in the last step, FSDP2 sends {figures['dense_bytes']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
