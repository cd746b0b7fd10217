"""Traces: exact shapes, times that add up, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.plan.traces import TRACE_NAMES, resolve_trace

# Parameters and tensors of torchvision's and Hugging Face's models.
KNOWN = {
    "resnet-50": (25_557_032, 161),
    "resnet-152": (60_192_808, 467),
    "vgg-19": (143_667_240, 38),
    "vit-large": (304_326_632, 392),
    "bert-base": (109_482_240 + 1538, 201),  # with pooler and a head for question answering
    "bert-large": (335_141_888 + 2050, 393),
    "gpt2-large": (774_030_080, 436),
    "lstm": (37_319_278, 11),
}


def forward(trace: Trace) -> float:
    return sum(tensor.forward for tensor in trace.tensors)


def backward(trace: Trace) -> float:
    return sum(tensor.backward for tensor in trace.tensors)


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_models_have_their_known_parameters(name: str) -> None:
    trace = resolve_trace(name)
    assert (sum(trace.numels), len(trace.tensors)) == KNOWN[name]
    assert len({tensor.name for tensor in trace.tensors}) == len(trace.tensors)


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_backward_takes_twice_as_long_as_forward_and_the_source_is_stated(name: str) -> None:
    trace = resolve_trace(name)
    assert backward(trace) == pytest.approx(2 * forward(trace))
    assert 5e-3 < forward(trace) < 0.1
    assert "modelled, not measured" in trace.source


def test_the_two_published_traces_have_their_published_times() -> None:
    assert forward(resolve_trace("bert-large")) == pytest.approx(50e-3)
    assert backward(resolve_trace("resnet-50")) == pytest.approx(40e-3)


def test_traces_survive_a_file(tmp_path: Path) -> None:
    trace = Trace("job", (TraceTensor("a", (3, 0), 0.25, 0.5), TraceTensor("b", (), 1 / 3)), 0.125, "measured")
    trace.save(tmp_path / "job.json")
    assert Trace.load(tmp_path / "job.json") == trace
    assert resolve_trace(tmp_path / "job.json") == trace


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"format": "other", "version": 1}', '{"tensors": []}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.json"):
        Trace.load(path)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    resolve_trace("lstm").save(tmp_path / "later.json")
    content = json.loads((tmp_path / "later.json").read_text(encoding="utf-8"))
    (tmp_path / "later.json").write_text(json.dumps({**content, "version": 2}), encoding="utf-8")
    with pytest.raises(ValueError, match="version"):
        Trace.load(tmp_path / "later.json")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'bert-larg'.*'bert-large'"):
        resolve_trace("bert-larg")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_make_no_sense_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="'a'"):
        Trace("job", (TraceTensor("a", (1,), seconds),))


def test_a_trace_needs_tensors() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        Trace("job", ())


def test_a_jobs_file_in_a_traces_place_is_refused_with_the_command_that_reads_it() -> None:
    with pytest.raises(ValueError, match="job.yaml is no trace. If it describes a job: safusion bench --config"):
        resolve_trace("job.yaml")
