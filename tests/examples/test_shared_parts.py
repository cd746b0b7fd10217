"""What the workloads share: every worker's part of the data, and published weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2Model, ViTConfig, ViTModel

from examples.workloads.language.gpt2 import GPT2
from examples.workloads.sharing import SharedData
from examples.workloads.squad.bert import BertSquad
from examples.workloads.vision.networks import ViT


def shared(rank: int, workers: int) -> SharedData:
    """The data module of one of several workers."""
    data = SharedData()
    data.trainer = Trainer(accelerator="cpu", devices=workers, strategy="ddp", logger=False)
    data.trainer.strategy.cluster_environment.set_global_rank(rank)  # type: ignore[attr-defined]  # of DDPStrategy
    data.trainer.strategy._local_rank = rank  # type: ignore[attr-defined]
    assert data.rank == rank
    return data


@pytest.mark.parametrize("count", [12, 14])
def test_every_held_out_sample_is_seen_once_and_batches_of_training_are_equally_many(count: int) -> None:
    loaders = [
        (data.held_out_loader(range(count), 2), data.training_loader(range(count), 2))
        for data in (shared(rank, workers=3) for rank in range(3))
    ]
    held_out = torch.cat([batch for loader, _ in loaders for batch in loader])
    assert sorted(held_out.tolist()) == list(range(count))
    trained = [torch.cat(list(loader)) for _, loader in loaders]
    assert [len(samples) for samples in trained] == [4, 4, 4]
    assert len(torch.cat(trained).unique()) == 12  # no sample twice

    _, first = loaders[0]
    first.sampler.set_epoch(1)  # type: ignore[attr-defined]  # of DistributedSampler; Lightning does so
    assert torch.cat(list(first)).tolist() != trained[0].tolist()


def test_too_few_samples_are_refused_by_all_workers() -> None:
    for rank in range(3):
        data = shared(rank, workers=3)
        with pytest.raises(ValueError, match="2 held-out samples are too few for 3 workers"):
            data.held_out_loader(range(2), 1)
        with pytest.raises(ValueError, match="11 training samples are too few for 3 workers with batch_size=4"):
            data.training_loader(range(11), 4)
        assert len(data.training_loader(range(12), 4)) == 1


TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2}
#: A model as it is published, one of ours of the same sizes, and what begins with random weights in it.
PUBLISHED: dict[str, tuple[Callable[[], Any], Callable[..., Any], tuple[str, ...]]] = {
    "gpt2": (
        lambda: GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=32)),
        lambda **changed: GPT2(**(SIZES | {"vocabulary_size": 40, "positions": 32} | changed)),
        (),
    ),
    "bert": (
        lambda: BertForPreTraining(BertConfig(vocab_size=40, **TRANSFORMER)),
        lambda **changed: BertSquad(**(SIZES | {"intermediate": 16, "vocabulary_size": 40} | changed)),
        ("qa_outputs.bias", "qa_outputs.weight"),
    ),
    "vit": (
        lambda: ViTModel(ViTConfig(image_size=16, patch_size=8, **TRANSFORMER)),
        lambda **changed: ViT(10, **(SIZES | {"intermediate": 16, "image_size": 16, "patch_size": 8} | changed)),
        ("classifier.bias", "classifier.weight"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("safe", [True, False])
def test_published_weights_are_taken_and_dropout_is_on(name: str, safe: bool, tmp_path: Path) -> None:
    published, ours, new = PUBLISHED[name]
    weights = published()
    weights.save_pretrained(tmp_path)
    if not safe:
        (tmp_path / "model.safetensors").unlink()
        torch.save(weights.state_dict(), tmp_path / "pytorch_model.bin")
    model: LightningModule | torch.nn.Module = ours(pretrained=tmp_path)
    ours_by_name = {key.removeprefix("net."): value for key, value in model.state_dict().items()}
    theirs = weights.state_dict()
    prefix = {"gpt2": "transformer.", "bert": "", "vit": "vit."}[name]
    taken = {
        key
        for key, value in ours_by_name.items()
        if torch.equal(value, theirs.get(key.removeprefix(prefix), torch.empty(0)))
    }
    left = set(ours_by_name) - taken - {"lm_head.weight"}  # GPT-2's output is its embedding
    assert left == set(new)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("changed", [{"hidden": 32}, {"layers": 2}], ids=str)
def test_weights_of_another_size_are_refused(name: str, changed: dict[str, int], tmp_path: Path) -> None:
    """transformers itself only warns of missing layers, and training would begin with random ones."""
    published, ours, _ = PUBLISHED[name]
    published().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors does not fit the sizes of the model: .*config.json"):
        ours(pretrained=tmp_path, **changed)
