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


def test_models_have_their_known_parameters_and_state_their_source() -> None:
    assert set(TRACE_NAMES) == set(KNOWN)
    for name, known in KNOWN.items():
        trace = resolve_trace(name)
        assert (sum(trace.numels), len(trace.tensors)) == known
        assert len({tensor.name for tensor in trace.tensors}) == len(trace.tensors)
        assert "modelled, not measured" in trace.source


def test_the_two_published_traces_have_their_published_times() -> None:
    assert sum(tensor.forward for tensor in resolve_trace("bert-large").tensors) == pytest.approx(50e-3)
    assert sum(tensor.backward for tensor in resolve_trace("resnet-50").tensors) == pytest.approx(40e-3)


def test_traces_survive_a_file(tmp_path: Path) -> None:
    trace = Trace("job", (TraceTensor("a", (3, 0), 0.25, 0.5), TraceTensor("b", (), 1 / 3)), 0.125, "measured")
    trace.save(tmp_path / "job.json")
    assert Trace.load(tmp_path / "job.json") == trace
    assert resolve_trace(tmp_path / "job.json") == trace


LATER = {"format": "lightning-safusion-trace", "version": 2, "name": "a job", "tensors": []}


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"tensors": []}', json.dumps(LATER)])
def test_other_files_and_later_versions_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.json"):
        Trace.load(path)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'bert-larg'.*'bert-large'"):
        resolve_trace("bert-larg")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_traces_that_make_no_sense_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="'a'"):
        Trace("job", (TraceTensor("a", (1,), seconds),))
    with pytest.raises(ValueError, match="no tensors"):
        Trace("job", ())


def test_a_jobs_file_in_a_traces_place_is_refused_with_the_command_that_reads_it() -> None:
    with pytest.raises(ValueError, match="job.yaml is no trace. If it describes a job: safusion bench --config"):
        resolve_trace("job.yaml")
