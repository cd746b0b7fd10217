"""What the workloads share: every worker's part of the data, and published weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2Model, ViTConfig, ViTForImageClassification

from examples.workloads.language.gpt2 import GPT2
from examples.workloads.language.raw_wikitext import WikiText103
from examples.workloads.language.wikitext import WikiText2
from examples.workloads.sharing import SharedData
from examples.workloads.squad.bert import BertSquad
from examples.workloads.squad.data import Squad
from examples.workloads.vision.cifar import Cifar100
from examples.workloads.vision.imagenet import ImageNet
from examples.workloads.vision.networks import ViT
from tests.examples.workload_runs import shared


@pytest.mark.parametrize("count", [12, 14])
def test_every_held_out_sample_is_seen_once_and_batches_of_training_are_equally_many(count: int) -> None:
    loaders = [
        (data.held_out_loader(range(count), 2), data.training_loader(range(count), 2))
        for data in (shared(SharedData(), rank, workers=3) for rank in range(3))
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
        data = shared(SharedData(), rank, workers=3)
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
    "vit": (  # with a head of its own
        lambda: ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=5, **TRANSFORMER)),
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
    model = ours(pretrained=tmp_path)
    ours_by_name = {key.removeprefix("net."): value for key, value in model.state_dict().items()}
    theirs = weights.state_dict()
    prefix = {"gpt2": "transformer.", "bert": "", "vit": ""}[name]
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


TEXTS, SQUAD = [f"wiki.{split}.raw" for split in ("train", "valid", "test")], ["train-v1.1.json", "dev-v1.1.json"]
SOURCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cifar": (Cifar100, r"no train, test\. .*cifar-100-python.tar.gz.*--data.folder"),
    "imagenet": (ImageNet, r"no train, val\. .*ILSVRC2012_img_train.tar.*--data.folder"),
    "wikitext-2": (partial(WikiText2, vocabulary_size=2), r"no wiki.train.tokens, .*wikitext-2-v1.zip.*--data.folder"),
    "wikitext-103": (lambda at: WikiText103(at, at), r"no wiki.valid.raw, .*wikitext-103-raw-v1.zip .*--data.folder"),
    "squad": (lambda at: Squad(at, at), r"no dev-v1.1.json\. Get both from https://rajpurkar.*--data.folder"),
    "words of wikitext-103": (
        lambda at: WikiText103(at / "all", at / "x"), r"no vocab.json, merges.txt\. .*gpt2-large.*--data.vocabulary"
    ),
    "words of squad": (lambda at: Squad(at / "all", at / "x" / "words"), r"no words\. .*--data.vocabulary"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_missing_files_are_named_with_their_source(name: str, tmp_path: Path) -> None:
    make, message = SOURCES[name]
    (tmp_path / "all").mkdir()
    for path in (tmp_path / TEXTS[0], tmp_path / SQUAD[0], *(tmp_path / "all" / file for file in (*TEXTS, *SQUAD))):
        path.touch()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.* has {message}"):
        make(tmp_path).setup("fit")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_model_is_named_with_its_source(name: str, tmp_path: Path) -> None:
    option = "model.network.pretrained" if name == "vit" else "model.pretrained"
    with pytest.raises(FileNotFoundError, match=f"no config.json, model.safetensors. .*--{option}"):
        PUBLISHED[name][1](pretrained=tmp_path)
