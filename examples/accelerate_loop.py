"""A loop of Hugging Face Accelerate; its handler is the one line of SAFusion. It resumes from its checkpoint.

torchrun --nproc-per-node 2 accelerate_loop.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]  # it has no types
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion.hugging_face import SAFusionKwargs

EPOCHS, CHECKPOINTS = 5, Path("accelerate_loop")


def points(count: int) -> TensorDataset:
    """Pairs of points (float32 [4]), and whether they lie in the same quadrant (0.0 or 1.0)."""
    pairs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pairs, ((pairs[:, :2] > 0) == (pairs[:, 2:] > 0)).all(dim=1).float())


def main() -> None:
    """Trains on the processes that torchrun has started."""
    handler = SAFusionKwargs(collective="allgather")  # "auto", the default, may choose DDP
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[handler])
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
    )
    loader = DataLoader(points(8192), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=2e-3), loader)
    handler.bind(optimizer)  # without it, the first step is one of DDP
    accelerator.register_for_checkpointing(handler)  # residuals are saved and loaded with the rest

    first = 0
    if finished := sorted(CHECKPOINTS.glob("epoch_*")):
        accelerator.load_state(str(finished[-1]))  # also on more or fewer workers
        first = int(finished[-1].name.removeprefix("epoch_")) + 1
        accelerator.print(f"goes on after epoch {first - 1}")
    for epoch in range(first, EPOCHS):
        hits, count = 0.0, 0
        for x, y in loader:
            logits = model(x).squeeze(1)
            optimizer.zero_grad()
            accelerator.backward(nn.functional.binary_cross_entropy_with_logits(logits, y))
            optimizer.step()
            hits += float(((logits > 0) == (y > 0.5)).float().sum())
            count += len(y)
        unfinished = CHECKPOINTS / "unfinished"
        accelerator.save_state(str(unfinished))  # on all workers: the residuals of all go into it
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unfinished.rename(CHECKPOINTS / f"epoch_{epoch:03}")
        accelerator.print(f"epoch {epoch}: accuracy {hits / count:.3f}")
        for attached in handler.attached:  # none with one worker
            figures = attached.figures()
            accelerator.print(f"{figures['bytes_sent']} bytes in the last step, DDP sends {figures['dense_bytes']}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
