"""State by name: logical order, other orders and models, plan and costs, side files of in-process workers.

Everything here runs on virtual workers; ``tests/integration/test_checkpoint.py`` does the same with real trainers.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_safusion import Cadence, OkTopk, SIDCo
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.layout import specs_from_parameters
from lightning_safusion.fusion.plans.adaptive import Adaptive
from lightning_safusion.fusion.plans.profile import AgreedProfile
from lightning_safusion.fusion.state import MemoryBuilder, common_state, local_state, restore_common, restore_sparsifier
from lightning_safusion.integration import checkpoint
from tests.cluster import Cluster, specs
from tests.fusion.windows import Make, random_window, train
from tests.models import equal


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, collective="allgather")


def save(cluster: Cluster, path: Path | str) -> dict[str, Any]:
    text = cluster.settings[0].describe()
    entries = cluster.each(lambda rank: checkpoint.save(cluster.engines[rank], text, path))
    assert all(entry == entries[0] for entry in entries)
    return entries[0]


def restore(cluster: Cluster, entry: dict[str, Any], path: Path | str) -> list[list[str]]:
    text = cluster.settings[0].describe()
    return cluster.each(lambda rank: checkpoint.restore(cluster.engines[rank], text, entry, path))


def test_residuals_are_saved_in_logical_order(make: Make) -> None:
    model = nn.Module()
    model.conv = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    model.turned = nn.Parameter(torch.zeros(5, 3, dtype=torch.complex64).t())
    model.plain = nn.Parameter(torch.zeros(6))
    cluster = make(1, specs_from_parameters(model.named_parameters()), density=0.5)
    names = [spec.name for spec in cluster.specs]
    for _, p in model.named_parameters():
        p.grad = torch.randn_like(p)  # in the parameter's memory format, as DDP lays it out
    memory = cluster.settings[0].memory
    real = {name: torch.view_as_real(p.grad) if p.is_complex() else p.grad for name, p in model.named_parameters()}
    given = [real[name].as_strided((real[name].numel(),), (1,)) for name in names]
    memory.compensate(range(len(given)), given, [False] * len(given), torch.ones(len(given)))
    saved = local_state(cluster.engines[0])["memory"]["residual"]
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        "conv.weight": (4, 3, 2, 2),
        "turned": (3, 5, 2),
        "plain": (6,),
    }
    assert all(torch.equal(tensor, real[name]) for name, tensor in saved.items())
    # the same model in the usual memory format
    contiguous = make(1, [replace(spec, strides=None) for spec in cluster.specs])
    held = MemoryBuilder(contiguous.engines[0])
    held.add({"residual": saved})
    held.restore()
    for index, name in enumerate(names):
        assert torch.equal(contiguous.residual(0, index).float(), real[name].flatten())


@pytest.mark.parametrize("gapped", [torch.zeros(4, 6)[:, ::2], torch.zeros(1, 3).expand(4, 3)])
def test_gradients_of_parameters_with_gaps_or_overlaps_arrive_contiguous(gapped: torch.Tensor) -> None:
    assert specs_from_parameters([("p", gapped.requires_grad_())])[0].strides is None


def test_order_and_plan_are_restored(make: Make, tmp_path: Path) -> None:
    # nothing that is saved depends on checksums of messages
    whole, resumed = (make(2, quota="pooled", integrity=integrity) for integrity in (None, "checksum"))
    train(whole, 5)
    entry = save(whole, tmp_path / "a.ckpt")
    assert restore(resumed, entry, tmp_path / "a.ckpt") == [[], []]
    engine = resumed.engines[0]
    assert engine.planner.current == whole.engines[0].planner.current is not None
    assert [s.index for s in engine.space.layout.specs] == whole.order
    # DDP's first bucket holds everything, in the order of registration: neither order nor plan is lost over it
    grads = whole.random_grads(5)
    expected, found = whole.step(grads), resumed.step(grads, order=range(len(whole.specs)))
    assert [s.index for s in engine.space.layout.specs] == whole.order
    assert engine.record.as_dict()["plan"] == whole.engines[0].record.as_dict()["plan"]
    assert equal(expected, found)
    assert equal(train(whole, 9, 6)[0], train(resumed, 9, 6)[0])


def test_agreed_costs_and_the_schedule_are_restored(make: Make) -> None:
    options = {"fusion": Adaptive(cadence=Cadence(warmup_every=4)), "collective": "auto", "density": 0.01}
    first, second = make(2, measure=True, **options), make(2, measure=True, **options)
    train(first, 9)
    states = [common_state(engine) for engine in first.engines]
    assert states[0] == states[1]
    planner = states[0]["planner"]
    assert planner["schedule"]["windows"] == 7
    profile = AgreedProfile.from_vector(np.array(planner["profile"]))
    assert len(profile.arrivals) == len(first.specs)
    assert isinstance(profile.allgather, LinearCost)
    second.each(lambda rank: restore_common(second.engines[rank], states[rank]))
    assert common_state(second.engines[0]) == states[0]
    train(second, 15, 9)  # agrees on costs and verifies the plan, or raises


def test_what_exchanges_have_learnt_goes_on_where_it_stopped(make: Make, tmp_path: Path) -> None:
    options = {"collective": "oktopk", "fusion": "wfbp", "tensors": specs(((40, 30), (40,), (90, 70), (7, 11), (64,)))}
    whole, resumed, fewer = make(3, **options), make(3, **options), make(2, **options)
    train(whole, 4)
    learnt = common_state(whole.engines[0])["exchanges"]
    assert len(learnt) > 2
    assert max(state["step"] for _, state in learnt) > 1  # in step 0 thresholds are found anew
    entry = save(whole, tmp_path / "a.ckpt")
    assert restore(resumed, entry, tmp_path / "a.ckpt") == [[]] * 3
    assert common_state(resumed.engines[0])["exchanges"] == learnt  # nothing has been built yet
    assert equal(train(whole, 8, 4)[0], train(resumed, 8, 4)[0])
    assert common_state(resumed.engines[0]) == common_state(whole.engines[0])
    assert restore(fewer, entry, tmp_path / "a.ckpt") == [[]] * 2
    assert common_state(fewer.engines[0])["exchanges"] == []


def test_what_exchanges_have_learnt_outlives_a_job_but_not_an_abandoned_window(make: Make) -> None:
    cluster = make(2, collective="oktopk", fusion="single")
    train(cluster, 3)
    learnt = [common_state(engine)["exchanges"] for engine in cluster.engines]
    cluster.each(lambda rank: cluster.engines[rank].release())
    assert [common_state(engine)["exchanges"] for engine in cluster.engines] == learnt
    assert len(learnt[0]) == 1
    random_window(cluster, 3)
    cluster.engines[1].push(cluster.order[0], torch.zeros(cluster.specs[cluster.order[0]].numel))
    cluster.each(lambda rank: cluster.engines[rank].reset())
    assert common_state(cluster.engines[1])["exchanges"] == []


def test_with_other_settings_only_counters_and_order_are_restored(make: Make, tmp_path: Path) -> None:
    saved = make(2)
    train(saved, 4)
    entry = save(saved, tmp_path / "a.ckpt")
    for other in (make(3), make(2, fusion="wfbp"), make(2, wire="bf16")):
        assert restore(other, entry, tmp_path / "a.ckpt") == [[]] * len(other.transports)
        assert other.engines[0].windows == 4
        assert other.engines[0].planner.current is None
        assert [s.index for s in other.engines[0].space.layout.specs] == saved.order
        train(other, 6, 4)


def test_a_plan_for_another_model_is_refused(make: Make) -> None:
    cluster = make(1)
    train(cluster, 3)
    state = common_state(cluster.engines[0])["planner"]
    state["plan"] = state["plan"][:-1]
    with pytest.raises(ValueError, match=f"the model has {len(cluster.specs)}"):
        cluster.engines[0].planner.load_state_dict(state, cluster.engines[0].space.shape)


@pytest.mark.parametrize("scope", ["tensor", "group"])
@pytest.mark.parametrize("compressor", [OkTopk, lambda: SIDCo(adapt=True, stages=1, adapt_every=2)])
def test_learnt_thresholds_follow_their_tensor(make: Make, compressor: Any, scope: str) -> None:
    first = make(1, fusion="wfbp", compressor=compressor(), scope=scope)
    train(first, 4)
    state = local_state(first.engines[0])["compressor"]
    assert all("t" in str(key) for key in state["keys"])
    # the same tensors, registered the other way round
    turned = [replace(spec, index=i) for i, spec in enumerate(reversed(first.specs))]
    second = make(1, turned, fusion="wfbp", compressor=compressor(), scope=scope)
    restore_sparsifier(second.engines[0], state)
    last = len(turned) - 1
    for key in first.engines[0].space.selector.sparsifier.state_dict()["keys"]:
        moved = last - key if isinstance(key, int) else (key[0], last - key[1], key[2])
        assert moved in second.engines[0].space.selector.sparsifier.state_dict()["keys"]
    assert local_state(second.engines[0])["compressor"]["keys"] == state["keys"]
    with pytest.raises(ValueError, match="not the state of"):
        restore_sparsifier(second.engines[0], {"keys": ["t1"]})


def test_tensors_are_matched_by_name_and_shape(make: Make, tmp_path: Path) -> None:
    saved = make(2)
    train(saved, 4)
    entry = save(saved, tmp_path / "a.ckpt")
    tensors = list(saved.specs)
    tensors[1] = replace(tensors[1], name="new")
    tensors[4] = replace(tensors[4], shape=(8, 8))
    other = make(2, tensors)
    notes = restore(other, entry, tmp_path / "a.ckpt")
    assert notes[0] == notes[1]
    (note,) = notes[0]
    assert [name in note for name in ("t1", "new", "t4", "t2")] == [True, True, True, False]
    for index in range(len(tensors)):
        expected = torch.zeros(tensors[index].numel).double() if index in (1, 4) else saved.residual(1, index)
        assert torch.equal(other.residual(1, index), expected)


def test_a_tensor_that_waits_for_its_optimizer_still_does(make: Make, tmp_path: Path) -> None:
    saved, other = make(2), make(2)
    for engine in (*saved.engines, *other.engines):
        engine.steps.tracked[:] = True
    random_window(saved, 0)
    for engine in saved.engines:
        engine.steps.unstepped[:3] = False
    restore(other, save(saved, tmp_path / "a.ckpt"), tmp_path / "a.ckpt")
    assert other.engines[0].steps.unstepped.tolist() == [False] * 3 + [True] * (len(saved.specs) - 3)


def test_an_engine_that_trained_on_goes_back(make: Make, tmp_path: Path) -> None:
    cluster, straight = make(2, quota="pooled"), make(2, quota="pooled")
    for start in (0, 4):
        train(straight, start)
        train(cluster, start)
        entry = save(cluster, tmp_path / "a.ckpt")
        train(cluster, 54, 50)
        assert restore(cluster, entry, tmp_path / "a.ckpt") == [[], []]
        assert equal(train(cluster, start + 4, start)[0], train(straight, start + 4, start)[0])


def test_remote_folders(make: Make) -> None:
    path = f"memory://{uuid.uuid4().hex}/run/a.ckpt"
    saved, other = make(2), make(2)
    train(saved, 3)
    entry = save(saved, path)
    assert restore(other, entry, path) == [[], []]
    assert torch.equal(other.residual(1, 6), saved.residual(1, 6))
    checkpoint.remove(path)
    notes = restore(other, entry, path)
    assert notes[0] == notes[1]
    assert f"rank_00000-{entry['nonce']}.pt is missing" in notes[0][0]
    assert not other.residual(1, 6).any()
    checkpoint.remove(path)  # nothing there any more


def test_links_are_followed_for_reading_and_replaced_in_writing(make: Make, tmp_path: Path) -> None:
    saved, other = make(1), make(1)
    train(saved, 3)
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / "last.ckpt"
    entry = save(saved, tmp_path / "a.ckpt")
    link.symlink_to(tmp_path / "a.ckpt")
    assert restore(other, entry, link) == [[]]
    entry = save(saved, link)
    assert (tmp_path / "other" / "last.ckpt.safusion").is_dir()
    assert restore(other, entry, link) == [[]]
    checkpoint.remove(link)
    assert (tmp_path / "a.ckpt.safusion").is_dir()
    assert not (tmp_path / "other" / "last.ckpt.safusion").exists()


def test_workers_that_loaded_different_checkpoints_all_begin_with_nothing(make: Make, tmp_path: Path) -> None:
    cluster = make(2)
    train(cluster, 3)
    entries = [save(cluster, tmp_path / name) for name in "ab"]
    text = cluster.settings[0].describe()
    notes = cluster.each(
        lambda rank: checkpoint.restore(cluster.engines[rank], text, entries[rank], tmp_path / "ab"[rank])
    )
    assert notes[0] == notes[1]
    assert "different checkpoints" in notes[0][0]
    assert not any(cluster.residual(rank, 6).any() for rank in range(2))


def test_an_unknown_format_is_left_alone(make: Make, tmp_path: Path) -> None:
    cluster = make(1)
    entry = save(cluster, tmp_path / "a.ckpt")
    assert "version 99" in restore(cluster, entry | {"format": 99}, tmp_path / "a.ckpt")[0][0]
