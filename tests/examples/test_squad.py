"""BERT on SQuAD: windows, answers mapped back to the text, exact match and F1, on cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor

from examples.workloads.squad.bert import BertSquad, best_span
from examples.workloads.squad.data import Squad, collate
from examples.workloads.squad.windows import Answer, Question, Window, cut, read_squad
from tests.models import trainer

WORDS = ["where", "?", *"abcdefghij", "strasse", "zurich", "##er", "##see", "der", ",", "日", "本"]
SMALL: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 16, "vocabulary_size": 40}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return tmp_path / "vocab.txt"


@pytest.fixture
def tokenizer(vocabulary: Path) -> BertWordPieceTokenizer:
    return BertWordPieceTokenizer(str(vocabulary), lowercase=True)


def ask(context: str, *answers: str, question: str = "where?", id_: str = "q") -> Question:
    return Question(id_, question, context, tuple(Answer(answer, context.index(answer)) for answer in answers))


def words(tokenizer: BertWordPieceTokenizer, window: Window) -> str:
    return " ".join(tokenizer.id_to_token(token) for token in window.tokens)


def whole(tokenizer: BertWordPieceTokenizer, question: Question) -> Window:
    """The one window of a question."""
    (window,) = cut(tokenizer, question, 30, doc_stride=8, max_question=64)
    return window


def peaks(window: Window, start: int, end: int, score: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scores with one peak each, at positions of the part of the context."""
    starts, ends = torch.zeros(len(window.tokens)), torch.zeros(len(window.tokens))
    starts[window.first + start] = ends[window.first + end] = score
    return starts, ends


def test_windows_overlap_and_cover_the_context(tokenizer: BertWordPieceTokenizer) -> None:
    windows = list(cut(tokenizer, ask("a b c d e f g h i j", "d e"), 9, doc_stride=3, max_question=64))
    assert [words(tokenizer, window) for window in windows] == [
        "[CLS] where ? [SEP] a b c d [SEP]",
        "[CLS] where ? [SEP] d e f g [SEP]",
        "[CLS] where ? [SEP] g h i j [SEP]",
    ]
    # "d e" hangs over the edge of the first window, begins the second, and is not in the third
    assert [(window.start, window.end) for window in windows] == [(0, 0), (4, 5), (0, 0)]


def test_an_answer_that_ends_a_window_is_in_it(tokenizer: BertWordPieceTokenizer) -> None:
    windows = list(cut(tokenizer, ask("a b c d e f g h i j", "c d"), 9, doc_stride=4, max_question=64))
    assert [(window.start, window.end) for window in windows] == [(6, 7), (0, 0), (0, 0)]
    assert [len(window.offsets) for window in windows] == [4, 4, 2]


@pytest.mark.parametrize("length", range(1, 11))
@pytest.mark.parametrize("doc_stride", [1, 2, 4])
def test_every_token_is_owned_by_one_window(length: int, doc_stride: int, tokenizer: BertWordPieceTokenizer) -> None:
    question = ask(" ".join("abcdefghij"[:length]))
    windows = list(cut(tokenizer, question, 9, doc_stride, max_question=64))
    owned = [window.text(p, p) for window in windows for p, own in enumerate(window.owned, window.first) if own]
    assert sorted(owned) == list("abcdefghij"[:length])


def test_a_token_is_owned_where_it_has_most_context(tokenizer: BertWordPieceTokenizer) -> None:
    first, second = cut(tokenizer, ask("a b c d e f g"), 10, doc_stride=2, max_question=64)
    # c d e f g is the second; d has one neighbour on its poorer side in both, and stays with the first
    assert first.owned.tolist() == [True, True, True, True, False]
    assert second.owned.tolist() == [False, False, True, True, True]


def test_a_stride_that_leaves_gaps_is_refused(tokenizer: BertWordPieceTokenizer) -> None:
    with pytest.raises(ValueError, match="doc_stride=5 must be 1 to 4"):
        list(cut(tokenizer, ask("a b c"), 9, doc_stride=5, max_question=64))


def test_a_long_question_is_shortened(tokenizer: BertWordPieceTokenizer) -> None:
    (window,) = cut(tokenizer, ask("a", question="b c d e f"), 9, doc_stride=2, max_question=3)
    assert words(tokenizer, window) == "[CLS] b c d [SEP] a [SEP]"


def test_answers_come_back_in_the_spelling_of_the_text(tokenizer: BertWordPieceTokenizer) -> None:
    context = "Der Zürichersee, 日本, der ZÜRICH"
    window = whole(tokenizer, ask(context, "日本"))
    assert words(tokenizer, window) == "[CLS] where ? [SEP] der zurich ##er ##see , 日 本 , der zurich [SEP]"
    assert window.text(window.start, window.end) == "日本"
    assert best_span(window, *peaks(window, 1, 3), 30) == (2.0, "Zürichersee")
    assert best_span(window, *peaks(window, 8, 9), 30) == (2.0, "der ZÜRICH")


@pytest.mark.parametrize(
    ("context", "answer", "found"),
    [
        # characters of several code points or bytes, outside the basic plane, are counted as Python does
        ("🙂🙂 Zu\u0308richersee 日本", "Zu\u0308richersee", "Zu\u0308richersee"),
        ("🙂🙂 Zu\u0308richersee 日本", "日本", "日本"),
        ("a zurich b", "uri", "zurich"),  # inside a word: the whole token
    ],
)
def test_an_answer_is_found(tokenizer: BertWordPieceTokenizer, context: str, answer: str, found: str) -> None:
    window = whole(tokenizer, ask(context, answer))
    assert window.text(window.start, window.end) == found


def test_the_best_span_is_in_the_context_forward_and_short(tokenizer: BertWordPieceTokenizer) -> None:
    window = whole(tokenizer, ask("a b c d e"))
    starts, ends = peaks(window, 3, 1)  # the end is before the start: one of both peaks counts
    score, text = best_span(window, starts, ends, 30)
    assert (score, text) == (1.0, "a b")
    starts, ends = peaks(window, 0, 4)
    assert best_span(window, starts, ends, 5) == (2.0, "a b c d e")
    assert best_span(window, starts, ends, 4)[0] == 1.0
    starts[0] = ends[0] = starts[-1] = ends[-1] = 9.0  # [CLS] and [SEP] are no answers
    assert best_span(window, starts, ends, 5) == (2.0, "a b c d e")
    window.owned = np.zeros(5, dtype=bool)
    assert best_span(window, starts, ends, 5) == (float("-inf"), "")


def test_batches_are_padded_and_masked(tokenizer: BertWordPieceTokenizer) -> None:
    windows = [*cut(tokenizer, ask("a b", "b"), 9, 3, 64), *cut(tokenizer, ask("a b c d", "a b"), 9, 3, 64)]
    batch = collate(windows, max_length=12)
    assert batch["input_ids"].shape == batch["token_type_ids"].shape == batch["attention_mask"].shape == (2, 12)
    assert batch["attention_mask"].sum(dim=1).tolist() == [7, 9]
    assert batch["input_ids"][0, 7:].tolist() == [0] * 5
    assert batch["token_type_ids"].tolist() == [[0] * 4 + [1] * 3 + [0] * 5, [0] * 4 + [1] * 5 + [0] * 3]
    assert batch["start_positions"].tolist() == [5, 4]
    assert batch["end_positions"].tolist() == [5, 5]


def squad_file(*questions: Question) -> str:
    def paragraph(question: Question) -> dict[str, Any]:
        answers = [{"text": text, "answer_start": start} for text, start in question.answers]
        asked = {"id": question.id, "question": question.question, "answers": answers}
        return {"context": question.context, "qas": [asked]}

    paragraphs = [paragraph(question) for question in questions]
    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})


def test_a_file_is_read_as_published(tmp_path: Path) -> None:
    questions = [ask("a b a", "b", "b a"), ask("c", "c", question="c?")]
    (tmp_path / "train.json").write_text(squad_file(*questions))
    assert read_squad(tmp_path / "train.json") == questions
    (tmp_path / "train.json").write_text(squad_file(Question("x7", "where?", "a b", (Answer("b", 0),))))
    with pytest.raises(ValueError, match="'b' of question x7 is not at 0"):
        read_squad(tmp_path / "train.json")


def test_exact_match_and_f1_are_those_worked_out_by_hand(
    tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of four tokens; the network is replaced by scores that point at words."""
    questions = [
        # predicted "f g", at the edge of the second window; the first has nothing of it, the third begins with "g"
        ask("h i j b d f g h i", "f g", id_="exact"),
        # predicted "c d e": two of three words shared, precision and recall 2/3
        ask("b c d e", "b c d", id_="partly"),
        # predicted "i", no word shared
        ask("i j", "j", id_="wrong"),
        # predicted "Zürichersee", as the text spells it: the better of two answers counts, upper case does not
        ask("Zürichersee, 日本 ZÜRICHERSEE", "Zürichersee, 日本", "ZÜRICHERSEE", id_="spelling"),
    ]
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(squad_file(*questions))
    numbers = {word: number for number, word in enumerate(WORDS, start=5)}
    firsts, lasts = ({numbers[word]: 9.0 for word in words} for words in (("f", "c", "zurich"), ("g", "e", "##see")))

    class Scores:
        def __init__(self, tokens: Tensor) -> None:
            self.start_logits, self.end_logits = (
                torch.tensor([[peaks.get(token, 0.0) for token in row] for row in tokens.tolist()])
                for peaks in (firsts, lasts)
            )

    model = BertSquad(**SMALL)
    monkeypatch.setattr(model.net, "forward", lambda input_ids, **_: Scores(input_ids))
    data = Squad(tmp_path, vocabulary, batch_size=3, max_length=9, doc_stride=3)
    (result,) = trainer("auto", devices=1).validate(model, data, verbose=False)
    assert result["val_exact_match"] == pytest.approx(100 * 2 / 4)
    assert result["val_f1"] == pytest.approx(100 * (1 + 2 / 3 + 0 + 1) / 4)
