"""Questions of SQuAD, and the windows of their contexts that BERT sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import BertWordPieceTokenizer

Array = npt.NDArray[Any]


class Answer(NamedTuple):
    """An answer as a part of the context."""

    text: str
    start: int  #: its first character in the context


class Question(NamedTuple):
    """One question about a text."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_squad(path: Path) -> list[Question]:
    """Reads a file of SQuAD v1.1 (Rajpurkar et al., 2016).

    Raises:
        ValueError: If an answer is not where the file says; names the question.
    """
    questions = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for entry in paragraph["qas"]:
                answers = tuple(Answer(answer["text"], answer["answer_start"]) for answer in entry["answers"])
                for text, start in answers:
                    if context[start : start + len(text)] != text:
                        raise ValueError(f"{path}: the answer {text!r} of question {entry['id']} is not at {start}")
                questions.append(Question(entry["id"], entry["question"], context, answers))
    return questions


class Window:
    """``[CLS] question [SEP] part of the context [SEP]``, as token numbers.

    Windows of a question overlap and share their arrays: SQuAD has 90 thousand of them, in every worker.

    Args:
        question: What is asked.
        query: Tokens of the question, int32 [tokens].
        part: Tokens of this part of the context, int32 [tokens].
        offsets: Of each token of the part its first character, and the one behind its last, int32 [tokens, 2].
        owned: Whether this window has the most context around a token among all windows that have it (bool [tokens]).
            Answers begin at such tokens only, so that each is judged once, where it is seen best (Devlin et al., 2019).
        span: First and last token of the answer within the part; nothing where it is not wholly in it.
        special: Numbers of ``[CLS]`` and ``[SEP]``.
    """

    # no dataclass: Lightning would look for tensors in every field of every one
    def __init__(
        self,
        question: Question,
        query: Array,
        part: Array,
        offsets: Array,
        owned: Array,
        span: tuple[int, int] | None,
        special: tuple[int, int],
    ) -> None:
        self.question = question
        self.query = query
        self.part = part
        self.offsets = offsets
        self.owned = owned
        self.special = special
        self.first = len(query) + 2  # position of the part's first token
        # without an answer both labels point to [CLS]
        self.start, self.end = (self.first + span[0], self.first + span[1]) if span else (0, 0)

    @property
    def tokens(self) -> Array:
        """All of its tokens, int64 [positions]."""
        cls, sep = self.special
        return np.concatenate([[cls], self.query, [sep], self.part, [sep]])

    def text(self, start: int, end: int) -> str:
        """The context from the token at position ``start`` to the one at ``end``, in its own spelling."""
        return self.question.context[self.offsets[start - self.first, 0] : self.offsets[end - self.first, 1]]


def cut(
    tokenizer: BertWordPieceTokenizer, question: Question, max_length: int, doc_stride: int, max_question: int
) -> Iterator[Window]:
    """Cuts a context into windows that overlap.

    Args:
        tokenizer: BERT's.
        question: What is asked; the first answer becomes the label.
        max_length: Tokens of a window at most, with the question and three special ones.
        doc_stride: Tokens from the start of a window to the start of the next.
        max_question: Tokens of the question that are kept.

    Yields:
        The windows from left to right.

    Raises:
        ValueError: If tokens would fall between two windows.
    """
    query = np.array(tokenizer.encode(question.question, add_special_tokens=False).ids[:max_question], np.int32)
    context = tokenizer.encode(question.context, add_special_tokens=False)
    room = max_length - len(query) - 3
    if not 0 < doc_stride <= room:
        raise ValueError(
            f"doc_stride={doc_stride} must be 1 to {room}: the tokens of max_length={max_length} left for text"
        )
    special = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokens, offsets = np.array(context.ids, np.int32), np.array(context.offsets, np.int32).reshape(-1, 2)
    answer = _token_span(offsets, question.answers[0]) if question.answers else None
    starts = range(0, max(1, len(tokens) - room + doc_stride), doc_stride)
    parts = [range(start, min(start + room, len(tokens))) for start in starts]
    owners = _owners(parts, len(tokens))
    for number, part in enumerate(parts):
        inside = answer is not None and answer[0] in part and answer[1] in part
        yield Window(
            question,
            query,
            tokens[part.start : part.stop],
            offsets[part.start : part.stop],
            owners[part.start : part.stop] == number,
            (answer[0] - part.start, answer[1] - part.start) if answer and inside else None,
            special,
        )


def _token_span(offsets: Array, answer: Answer) -> tuple[int, int] | None:
    """First and last token that share a character with the answer."""
    inside = np.flatnonzero((offsets[:, 0] < answer.start + len(answer.text)) & (offsets[:, 1] > answer.start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _owners(parts: list[range], count: int) -> Array:
    """For each token the part with the most tokens on its poorer side; of equal ones the first, and so the longest."""
    scores = np.full((len(parts), count), -1)
    for number, part in enumerate(parts):
        scores[number, part.start : part.stop] = np.minimum(np.arange(len(part)), np.arange(len(part))[::-1])
    return scores.argmax(axis=0)
