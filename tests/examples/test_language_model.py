"""The LSTM on WikiText-2: windows of the text, perplexity, state, and training below a bigram model's perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional

from examples.workloads.language.lstm import LSTMLanguageModel
from examples.workloads.language.tokens import IGNORED, Columns, Vocabulary, words
from examples.workloads.language.wikitext import WikiText2
from examples.workloads.make_tiny_data import make_wikitext2
from tests.models import trainer

VOCABULARY = 90  # of lstm_wikitext2_tiny.yaml


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wikitext")
    make_wikitext2(folder)
    return folder


def write_text(folder: Path, **texts: str) -> Path:
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(texts.get(split, texts["train"]), encoding="utf-8")
    return folder


def test_words_are_separated_by_blanks_and_lines_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(" \n = Größe = \n a <unk> \n", encoding="utf-8")
    assert list(words(tmp_path / "text")) == ["<eos>", "=", "Größe", "=", "<eos>", "a", "<unk>", "<eos>"]


def test_a_vocabulary_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("b a a c <unk> <unk> <unk> <unk>\n")
    vocabulary = Vocabulary(tmp_path / "train", size=3)
    assert vocabulary.words == ["<unk>", "a", "b"]  # b, c and <eos> once each: the first to appear
    (tmp_path / "other").write_text("a d b <unk>")
    assert vocabulary.encode(tmp_path / "other").tolist() == [1, 0, 2, 0, 0]
    with pytest.raises(ValueError, match="5 different words with <unk>, fewer than vocabulary_size=6"):
        Vocabulary(tmp_path / "train", size=6)


@pytest.mark.parametrize(("workers", "pad"), [(1, False), (2, False), (3, True)])
def test_columns_are_read_from_top_to_bottom(workers: int, pad: bool) -> None:
    tokens = torch.arange(100)
    items = [
        list(Columns(tokens, batch_size=2, window=7, rank=rank, workers=workers, pad=pad)) for rank in range(workers)
    ]
    columns = torch.cat([torch.cat([targets for _, targets in item]) for item in items], dim=1)
    assert columns.shape == ((17, 6) if pad else (99 // (2 * workers), 2 * workers))
    read = columns.t().flatten()
    assert read[read != IGNORED].tolist() == list(range(1, 100 if pad else 1 + columns.numel()))
    for inputs, targets in items[0]:
        assert torch.equal(inputs[1:], targets[:-1])
    assert len({len(item) for item in items}) == 1  # workers that have no batch left would be waited for


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens is too short for 2 x 3 columns"):
        Columns(torch.arange(5), batch_size=3, window=2, rank=0, workers=2, pad=False)


def test_the_perplexity_is_that_of_the_whole_text(tmp_path: Path) -> None:
    """Batches, windows and padding must not show: one pass over one column gives the same."""
    data = WikiText2(write_text(tmp_path, train="the cat sat on the mat\n" * 9), 7, batch_size=1, window=5)
    model = LSTMLanguageModel(7, embedding=4, hidden=6, layers=1, dropout=0.0)
    (result,) = trainer("auto", devices=1).validate(model, data, verbose=False)
    text = data.texts["validation"]
    with torch.no_grad():
        scores, _ = model(text[:-1, None])
        expected = functional.cross_entropy(scores.squeeze(1), text[1:]).exp()
    assert result["val_perplexity"] == pytest.approx(float(expected), rel=1e-5)

    data.batch_size = 5  # 62 targets in 13 rows: three are padding
    (padded,) = trainer("auto", devices=1).validate(model, data, verbose=False)
    assert padded["val_perplexity"] == pytest.approx(
        result["val_perplexity"], rel=0.05
    )  # columns begin without a state


def test_the_state_goes_on_and_a_validation_leaves_it_alone() -> None:
    model = LSTMLanguageModel(5, embedding=4, hidden=6, layers=2, dropout=0.0)
    text = torch.arange(60).view(20, 3) % 5
    whole, _ = model(text)
    model.on_train_epoch_start()
    first = model._scores(text[:8])
    model.on_validation_epoch_start()
    fresh = model._scores(text[5:])
    model.on_validation_epoch_end()
    second = model._scores(text[8:])
    torch.testing.assert_close(fresh, model(text[5:])[0])  # begins without a state
    torch.testing.assert_close(torch.cat([first, second]), whole)
    model.on_train_epoch_start()
    assert torch.equal(model._scores(text[:8]), first)


def test_the_learning_rate_is_multiplied_by_the_workers_and_halves_on_a_plateau() -> None:
    model = LSTMLanguageModel(5, embedding=4, hidden=6, lr=0.001, plateau_patience=3)
    model.trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]  # type: ignore[call-overload, index, typeddict-item]  # one of the many forms that Lightning takes
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
    for _ in range(5):  # the best value, then more epochs without progress than the patience
        scheduler.step(10.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
