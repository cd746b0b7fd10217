"""Trainings side by side: what is said in words, what is called unknown, the page, and the command's errors."""

from __future__ import annotations

import re
from math import nan
from pathlib import Path
from shlex import quote

import numpy as np
import pytest
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

import safusion_command as cli
from lightning_safusion import SAFusionStrategy
from lightning_safusion.tools.report.comparison import UNKNOWN, names, table
from lightning_safusion.tools.report.curves import render_curves, thinned
from tests.integration.test_readings import Logs
from tests.models import classification, trainer
from tests.process_group import run_launched
from tests.tools.report.document import Document
from tests.tools.report.runs import NASTY, write_run
from tests.tools.report.test_metrics_file import read, write_csv
from tests.tools.report.test_page import assert_well_formed, images


def sparse(folder: Path, until: int = 100, loss: float = 0.5) -> Path:
    """Forty logged steps of 20 ms: 4 MB of gradients, sent whole at first, a hundredth later."""
    rows = []
    for step in range(9, 400, 10):
        row = {"loss": loss + 1 / step, "epoch": 0}
        if step < until * 4:
            sent = {"safusion/sent_mb": 4.0 if step < 40 else 0.04, "safusion/exposed_ms": 3.0}
            row |= sent | {"safusion/dense_mb": 4.0, "safusion/density": 0.02}
        rows += [(step, row), (step, {"train/time": 0.02 * (step + 1)})]
    return write_csv(folder, rows)


def plain(folder: Path, timed: bool = True, column: str = "loss") -> Path:
    """Forty logged steps of 60 ms."""
    rows = [(step, {column: 0.4 + 1 / step}) for step in range(9, 400, 10)]
    return write_csv(folder, rows + [(step, {"train/time": 0.06 * (step + 1)}) for step, _ in rows if timed])


def words(*folders: Path) -> str:
    return "\n".join(render_curves([read(folder) for folder in folders])[1])


def test_two_runs_differ_in_words(tmp_path: Path) -> None:
    text = words(sparse(tmp_path / "saf"), plain(tmp_path / "ddp"))
    assert re.search(r"loss ended 25 % higher in saf: 0\.50\d+ in saf, 0\.40\d+ in ddp \(means of the last 5 ", text)
    sent = (4 * 4 + 0.04 * 36) / 40
    assert f"A worker sent {sent:.3g} MB in a step of saf" in text
    assert f"{4 / sent:.3g} times fewer bytes than the 4 MB of whole gradients" in text
    assert "at the end 100 times fewer" in text
    assert "What ddp sent is unknown: its file has no safusion/sent_mb" in text
    assert "A step took 20 ms in saf, 60 ms in ddp (medians): 3 times shorter in saf." in text
    assert "waited for the exchange: 3 ms in saf and unknown in ddp" in text


def test_two_sparse_runs_are_compared_with_each_other(tmp_path: Path) -> None:
    text = words(sparse(tmp_path / "a", loss=0.4), sparse(tmp_path / "b"))
    assert re.search(r"loss ended 20 % lower in a", text)
    assert "loss ended 298 % higher in c" in words(sparse(tmp_path / "c", loss=2.0), sparse(tmp_path / "b"))
    assert "(means of the logged steps).\n" in text  # the same bytes: neither has fewer
    assert "unknown" not in text


def test_a_run_that_sent_nothing_has_no_ratio(tmp_path: Path) -> None:
    none = write_csv(tmp_path / "none", [(step, {"loss": 1.0, "safusion/sent_mb": 0.0}) for step in range(9)])
    assert "A worker sent 0 MB in a step of none, 0.436 MB in one of saf (means of" in words(
        none, sparse(tmp_path / "saf")
    )


def test_a_difference_within_the_scatter_is_none(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=(2, 100))
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, values in zip(folders, noise, strict=True):
        write_csv(folder, [(step, {"loss": 5 + value}) for step, value in enumerate(values)])
    assert re.search(r"loss ended [\d.]+ % (lower|higher) in a \(no clear difference", words(*folders))


def test_what_files_do_not_say_is_unknown_and_how_to_know_it_is_said(tmp_path: Path) -> None:
    a, b = plain(tmp_path / "a", timed=False), plain(tmp_path / "b", timed=False, column="train_loss")
    text = words(a, b)
    assert "a and b have logged nothing under the same name (loss; train_loss)" in text
    assert "What was sent is unknown" in text
    assert "How long a step took is unknown in a and b." in text
    assert "When steps ended is unknown in a and b. Lightning's ThroughputMonitor logs it" in text
    assert [cells for name, cells in table([read(a), read(b)]) if name == "step, median"] == [[UNKNOWN, UNKNOWN]]


def test_a_run_that_became_plain_ddp_says_so(tmp_path: Path) -> None:
    text = words(sparse(tmp_path / "saf", until=50))
    assert "saf became plain DDP: its figures of the exchange end with step 199 of 399" in text
    assert "collective='allgather'" in text


def test_nan_is_named_with_its_file_and_left_out(tmp_path: Path) -> None:
    a = write_csv(tmp_path / "a", [(step, {"loss": nan if step > 5 else 1.0}) for step in range(10)])
    b = write_csv(tmp_path / "b", [(step, {"loss": nan}) for step in range(10)])
    page, said = render_curves([read(a), read(b)])
    text = "\n".join(said)
    assert f"{a / 'metrics.csv'}: loss is not finite in 4 of 10 rows, first in step 6" in text
    assert "How loss ended is unknown: b has no finite value" in text
    assert_well_formed(Document(page))


@pytest.mark.slow
def test_trainings_with_no_more_than_lightnings_own_logger_and_clock_can_be_compared(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        for name, strategy in (("saf", SAFusionStrategy(density=0.1, collective="allgather")), ("ddp", "ddp")):
            options = {"logger": CSVLogger(tmp_path, name=None, version=name), "log_every_n_steps": 4, "max_steps": 12}
            clock = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
            trainer(strategy, callbacks=[clock], **options).fit(Logs(), classification())

    run_launched(2, job)
    text = words(tmp_path / "saf", tmp_path / "ddp")
    assert re.search(r"loss ended .* in saf", text)
    assert "of whole gradients, which DDP hands to its all-reduce" in text
    assert re.search(r"A step took [\d.]+ ms in saf, [\d.]+ ms in ddp", text)
    assert "became plain DDP" not in text


def test_names_are_what_tells_runs_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "version_0" / "metrics.csv" for name in ("ddp", "saf")]
    assert names(paths) == ["ddp", "saf"]
    assert names(paths[:1]) == ["version_0"]
    assert names([tmp_path / "a.csv", tmp_path / "a" / "b" / "metrics.csv"]) == ["a", "a/b"]


def test_the_page_is_whole_and_draws_over_steps_and_time(tmp_path: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "-")
    page, said = render_curves([read(sparse(folder)), read(plain(tmp_path / "ddp", column="loss"))])
    document = Document(page)
    assert_well_formed(document)
    assert NASTY.replace("/", "-") in document.text
    assert f"safusion report {quote(str(folder / 'metrics.csv'))} " in document.text
    assert not document.elements("b")
    assert not document.elements("script")
    assert all(" ".join(text.split()) in document.text for text in said)
    drawn = images(document)
    assert len(drawn) == 5  # the loss twice; bytes, exposed time, density
    assert sum("seconds of training" in each for each in drawn) == 1
    assert not re.search(r"https?:|@import|url\((?!#)", page)


def test_long_curves_are_means_of_neighbours() -> None:
    x = np.arange(1000.0)
    thin, same = thinned(x, 2 * x)
    assert len(thin) == 400
    assert same == pytest.approx(2 * thin)
    assert thin.mean() == pytest.approx(x.mean(), abs=1)


def test_the_command_writes_one_page_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = sparse(tmp_path / "a"), plain(tmp_path / "b")
    cli.main(["report", str(a), str(b)])
    out = capsys.readouterr().out
    assert "3 times shorter in a" in out
    assert f"{a / 'comparison.html'}: open it in a browser" in out
    cli.main(["report", str(b / "metrics.csv"), "--output", str(tmp_path / "new" / "page.html")])
    assert "<h1>A training</h1>" in (tmp_path / "new" / "page.html").read_text()


def test_wrong_runs_are_named_with_what_to_do(tmp_path: Path) -> None:
    a = sparse(tmp_path / "a")
    profiled = write_run(tmp_path / "profiled")
    (tmp_path / "c" / "empty").mkdir(parents=True)
    (tmp_path / "note.txt").write_text("")
    for given, message in (
        ([a, tmp_path / "c"], r"no metrics.csv in .*c: .*CSVLogger"),
        ([a, profiled], r"no metrics.csv in .*profiled \(only overlap.json, which says nothing of the loss\)"),
        ([tmp_path], rf"{tmp_path} holds several runs: name those to show, of {a}$"),
        ([tmp_path / "c" / "empty"], "no overlap.json and no metrics.csv in .*OverlapProfiler"),
        ([a, a / "metrics.csv"], "a run is given twice"),
        ([a, tmp_path / "nowhere"], "there is no .*nowhere$"),
        ([a, tmp_path / "page.html"], r"there is no .*page.html. Did you mean --output .*page.html\?"),
        ([a, tmp_path / "note.txt"], ".*note.txt is no CSV: give metrics.csv"),
        ([a] * 7, "a page has room for 6 runs, got 7"),
    ):
        with pytest.raises(SystemExit, match=f"safusion: {message}"):
            cli.main(["report", *map(str, given)])
