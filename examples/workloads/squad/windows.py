"""Questions of SQuAD, and the windows of their contexts that BERT sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import BertWordPieceTokenizer


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

    Args:
        question: What is asked.
        query: Tokens of the question.
        part: Tokens of this part of the context.
        offsets: First character and the one behind the last, of each token of the part.
        owned: Whether this window has the most context around a token among all windows that have it. Answers begin at
            such tokens only, so that each is judged once, where it is seen best (Devlin et al., 2019).
        span: First and last token of the answer within the part; nothing where it is not wholly in it.
        special: Numbers of ``[CLS]`` and ``[SEP]``.
    """

    # no dataclass: Lightning would look for tensors in every field of every one
    def __init__(
        self,
        question: Question,
        query: list[int],
        part: list[int],
        offsets: list[tuple[int, int]],
        owned: list[bool],
        span: tuple[int, int] | None,
        special: tuple[int, int],
    ) -> None:
        cls, sep = special
        self.question = question
        self.first = len(query) + 2  # position of the part's first token
        self.tokens = [cls, *query, sep, *part, sep]
        self.types = [0] * self.first + [1] * (len(part) + 1)
        self.offsets = offsets
        self.owned = owned
        # without an answer both labels point to [CLS]
        self.start, self.end = (self.first + span[0], self.first + span[1]) if span else (0, 0)

    def text(self, start: int, end: int) -> str:
        """The context from the token at position ``start`` to the one at ``end``, in its own spelling."""
        return self.question.context[self.offsets[start - self.first][0] : self.offsets[end - self.first][1]]


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
    query = tokenizer.encode(question.question, add_special_tokens=False).ids[:max_question]
    context = tokenizer.encode(question.context, add_special_tokens=False)
    room = max_length - len(query) - 3
    if not 0 < doc_stride <= room:
        raise ValueError(
            f"doc_stride={doc_stride} must be 1 to {room}: the tokens of max_length={max_length} left for text"
        )
    special = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    answer = _token_span(context.offsets, question.answers[0]) if question.answers else None
    count = len(context.ids)
    starts = range(0, max(1, count - room + doc_stride), doc_stride)
    parts = [range(start, min(start + room, count)) for start in starts]
    for part in parts:
        inside = answer is not None and answer[0] in part and answer[1] in part
        yield Window(
            question,
            query,
            context.ids[part.start : part.stop],
            context.offsets[part.start : part.stop],
            [_best(parts, token) == part for token in part],
            (answer[0] - part.start, answer[1] - part.start) if answer and inside else None,
            special,
        )


def _token_span(offsets: list[tuple[int, int]], answer: Answer) -> tuple[int, int] | None:
    end = answer.start + len(answer.text)
    inside = [token for token, (first, behind) in enumerate(offsets) if first < end and behind > answer.start]
    return (inside[0], inside[-1]) if inside else None


def _best(parts: list[range], token: int) -> range:
    """The part with the most tokens on the poorer side of this one; of equal ones, the longer, then the first."""
    having = [part for part in parts if token in part]
    return max(having, key=lambda part: (min(token - part.start, part.stop - 1 - token), len(part)))
