"""The rules of docs/contributing.md for the project's English, as far as patterns hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_safusion
from tests.documents.pages import PAGES, name

#: Patterns that no page and no docstring has, and what to write in their place.
PHRASES = {
    r"(?:^|[.:] )What [^.?!|\n]{1,60} (?:is|are|was) (?:what|where|that)\b": "the thing: 'A row sends ...'",
    r"\b[Ww]hat was (?:held back|looked for|tried then)\b": "the thing that was held back",
    r"\bbelongs? into\b": "'belongs in', or 'move it into'",
    r"\bthat many (?:steps|times|workers)\b": "'about that often', or the number",
    r"\b(?:[Oo]ther|[Mm]ore|[Ee]arlier) runs (?:gave|found|had)\b": "a row of the table for each run, and no diary",
    r"\bmended since\b|\bwas not looked into\b": "what is true now, and no diary",
    r"\b(?:machine|host)s? at hand\b|\b(?:those|that|ones?) of now\b": "which one: 'this machine', 'today's'",
    r"\bfor want of\b": "'without'",
    r"\bbut for\b": "'except'",
    r"\ba \w+ of (?:the user's|one's own)\b": "'your job', 'a user's job'",
    r"\bsilly\b": "what fails, and how",
    r"\bare for you to get right\b": "who checks it",
    r"\btake home\b|\blives? through\b|\bgoes past\b": "the plain word: 'keep', 'path', 'ignores'",
}
SENTENCE, CELL = 45, 60  #: words at most
_CODE = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|^ {4,}(?![-*\d ]).*?$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )|\n(?=\s*\|)")
_END = re.compile(r"(?<=[.?!])[*_)\"']*\s+(?=[*_(\"'`]*[A-Z`0-9])")


def prose(text: str) -> Iterator[tuple[str, int]]:
    """Sentences and cells of tables with a span of code as one word, and how many words each may have."""
    text = re.sub(r"`[^`]+`", "`code`", _LINK.sub(r"\1", _CODE.sub("\n", text)))
    for block in _BLOCK.split(text):
        if block.lstrip().startswith("|"):
            yield from ((cell, CELL) for cell in block.split("|"))
        else:
            yield from ((sentence, SENTENCE) for sentence in _END.split(" ".join(block.split())))


def faults(text: str) -> list[str]:
    """What is wrong with a page, and what to do."""
    long = [(len(part.split()), part) for part, most in prose(text) if len(part.split()) > most]
    return phrases(text) + [f"{words} words, split: {part.strip()}" for words, part in long]


def phrases(text: str) -> list[str]:
    joined = re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=\w)", " ", text)  # a phrase may be broken by a line
    found = {better: re.search(pattern, joined, re.MULTILINE) for pattern, better in PHRASES.items()}
    return [f"{match[0]!r}: write {better}" for better, match in found.items() if match]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_in_plain_english(page: Path) -> None:
    found = faults(page.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("key", lightning_safusion.__all__)
def test_a_public_docstring_has_none_of_the_phrases(key: str) -> None:
    public = getattr(lightning_safusion, key)
    members = vars(public).values() if isinstance(public, type) else ()
    texts = [getattr(each, "__doc__", None) or "" for each in (public, *members)]
    assert [found for text in texts for found in phrases(text)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What a row sends is what it selects.", "write the thing"),
        ("It\nbelongs\ninto the module.", "belongs in"),
        ("- Other runs gave 1.12.", "no diary"),
        ("a " * 46 + "word.", "47 words"),
        ("| short | " + "a " * 61 + "|\n", "61 words"),
        ("One sentence. " + "`a b` [two words](x.md) " * 16 + "end.", "49 words"),
    ],
)
def test_a_fault_is_found(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert fault in found


def test_code_and_links_are_no_words() -> None:
    block = "```bash\n" + "word " * 99 + "\n```\n"
    assert faults(block + "Short. " + "`many words of code` " * 30 + "[t](" + "x" * 99 + ").") == []
