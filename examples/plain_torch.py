"""A training loop of plain PyTorch; ``attach`` is the one line of SAFusion. It resumes from its checkpoint.

torchrun --nproc-per-node 2 plain_torch.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_safusion

EPOCHS, CHECKPOINT = 5, Path("plain_torch.pt")


def points(count: int) -> TensorDataset:
    """Pairs of points (float32 [4]), and whether they lie in the same quadrant (0.0 or 1.0)."""
    pairs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pairs, ((pairs[:, :2] > 0) == (pairs[:, 2:] > 0)).all(dim=1).float())


def main() -> None:
    """Trains on the processes that torchrun has started."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
    )
    # small buckets: a buffer can be sent as soon as its gradients are there
    model = DistributedDataParallel(net.to(device), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    handle = lightning_safusion.attach(model, optimizer, collective="allgather")  # "auto", the default, may choose DDP

    data = points(8192)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["safusion"])  # on all workers, also on more or fewer of them
        first = saved["epoch"] + 1
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        hits = 0.0
        for x, y in DataLoader(data, batch_size=64, sampler=sampler):
            logits = model(x.to(device)).squeeze(1)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, y.to(device)).backward()
            optimizer.step()
            hits += float(((logits > 0) == (y.to(device) > 0.5)).float().sum())
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        state["safusion"] = handle.state_dict()  # on all workers: the residuals of all go to rank 0
        if dist.get_rank() == 0:
            torch.save(state, CHECKPOINT)
            figures = handle.figures()
            print(f"epoch {epoch}: accuracy {hits / len(sampler):.3f}, {figures['bytes_sent']} bytes in the last step,")
            print(f"    DDP sends {figures['dense_bytes']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
