"""Names with options in brackets: where a list of them is cut, and what is no list."""

from __future__ import annotations

import pytest

from lightning_safusion.notation import split


def test_commas_in_brackets_do_not_separate_rows() -> None:
    rows = split("ddp, saf-pooled[wire=q4, memory=residual[decay=0.9, x=1]],omgs")
    assert rows == ["ddp", "saf-pooled[wire=q4,memory=residual[decay=0.9,x=1]]", "omgs"]


@pytest.mark.parametrize("text", ["ddp[wire=q4", "ddp]", "ddp,,omgs", "omgs[wire=q4]x", "[wire=q4]", "a]b["])
def test_what_is_no_list_of_rows_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="several are written as in"):
        split(text)
