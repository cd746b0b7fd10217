"""GPT-2 on WikiText-103: blocks of byte pairs, perplexity, pretrained weights, and training of the tiny one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional

from examples.workloads.language.gpt2 import GPT2
from examples.workloads.language.raw_wikitext import WikiText103, encode
from examples.workloads.make_tiny_data import make_wikitext103
from tests.models import trainer

SMALL: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "vocabulary_size": 300, "positions": 32}


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wikitext")
    make_wikitext103(folder, characters=20_000, vocabulary=300)
    return folder


def test_blocks_are_the_text(wikitext: Path) -> None:
    tokenizer = ByteLevelBPETokenizer(str(wikitext / "vocab.json"), str(wikitext / "merges.txt"))
    (wikitext / "lines").write_text(" = Größe = \n \n\na 日本 b\r\n", encoding="utf-8", newline="")
    tokens = encode(wikitext / "lines", tokenizer)
    assert tokenizer.decode(tokens.tolist()) == " = Größe = \n \n\na 日本 b\r\n"

    data = WikiText103(wikitext, wikitext, batch_size=4, block=32)
    data.setup("fit")
    blocks = torch.cat(list(data.val_dataloader()))
    text = (wikitext / "wiki.valid.raw").read_text()
    assert text.startswith(tokenizer.decode(blocks.flatten().tolist()))
    assert len(encode(wikitext / "wiki.valid.raw", tokenizer)) - blocks.numel() < 32
    trained = torch.cat(list(data.train_dataloader()))
    assert len(trained) == len(data.blocks["train"]) // 4 * 4
    assert {tuple(row) for row in trained.tolist()} <= {tuple(row) for row in data.blocks["train"].tolist()}


def test_a_text_that_is_too_short_is_refused(wikitext: Path) -> None:
    with pytest.raises(ValueError, match="wiki.valid.raw has .* tokens, block=1000000 needs more"):
        WikiText103(wikitext, wikitext, block=1_000_000).setup("validate")


def test_the_perplexity_is_that_of_every_token_but_the_first_of_a_block(wikitext: Path) -> None:
    data = WikiText103(wikitext, wikitext, batch_size=3, block=32)
    model = GPT2(**SMALL)
    (result,) = trainer("auto", devices=1).validate(model, data, verbose=False)
    tokens = data.blocks["validation"].long()
    model.eval()  # no dropout
    with torch.no_grad():
        logits = model.net(input_ids=tokens).logits
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).exp()
    assert result["val_perplexity"] == pytest.approx(float(expected), rel=1e-4)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no trainer to log to
    assert float(model.training_step(tokens, 0).exp()) == pytest.approx(float(expected), rel=1e-4)
