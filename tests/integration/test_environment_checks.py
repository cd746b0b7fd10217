"""Environment variables that take overlap away are noticed, in one line, where a CUDA device is used; and so is what
two communicators at once need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.fusion.build import JobTraits
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.integration import engine_exchange
from lightning_safusion.integration.engine_exchange import EngineExchange
from lightning_safusion.integration.environment_checks import _HINDRANCES, hindrances
from lightning_safusion.integration.exchange import Choice, Mode
from tests.cluster import settings, specs
from tests.cuda import Silent, fake_cuda


@pytest.mark.parametrize(
    ("name", "values", "harmless"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", ("1", "2", " 4"), ("5", "8", "32", "", "many")),
        ("CUDA_LAUNCH_BLOCKING", ("1",), ("0", "")),
        ("TORCH_NCCL_BLOCKING_WAIT", ("1", "true", "Yes"), ("0", "false", "")),
        ("NCCL_BLOCKING_WAIT", ("1",), ("0",)),
        ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL", "detail"), ("INFO", "OFF", "")),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), ("0",)),
    ],
)
def test_values_that_hinder_are_named(name: str, values: tuple[str, ...], harmless: tuple[str, ...]) -> None:
    for value in values:
        line = hindrances({"PATH": "/bin", name: value})
        assert f"{name}={value} (" in line
        assert "unset" in line
    assert not any(hindrances({"PATH": "/bin", name: value}) for value in harmless)


def build(device: torch.device, transport: Transport | None = None, **parts: Any) -> EngineExchange:
    choice, options = Choice(Mode.ENGINE), {"static_graph": False}
    chosen = settings(**({"collective": "allgather"} | parts))
    return EngineExchange(chosen, specs(), choice, transport or SoloTransport(), device, JobTraits(), options, True, [])


def engine(chosen: EngineSettings, _: Any, transport: Transport, *__: Any, **___: Any) -> Any:
    """No more of an engine than the strategy reads before it runs."""
    space = SimpleNamespace(collective=chosen.collective_over(transport.world_size))
    return SimpleNamespace(space=space, fused=SimpleNamespace(serves=True), bind=lambda **_: None)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr("lightning_safusion.announce.rank_zero_info", said.append)
    monkeypatch.setattr(engine_exchange, "build_engine", engine)
    monkeypatch.setattr(engine_exchange, "left_to_torch", lambda *_: [])
    for name in (*_HINDRANCES, "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(name, raising=False)
    return said


def test_the_strategy_says_so_in_one_line_on_cuda(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with fake_cuda(monkeypatch) as device:
        build(device)
    (line,) = lines
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in line
    assert "TORCH_NCCL_BLOCKING_WAIT=1" in line
    assert "\n" not in line


def test_parts_without_fused_kernels_are_named_at_the_start(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_exchange, "left_to_torch", lambda *_: ["memory='dgc'", "offload=True"])
    with fake_cuda(monkeypatch) as device:
        build(device)
    assert ["no fused kernels for memory='dgc' and offload=True" in line for line in lines] == [True]


def test_buffers_without_fused_kernels_are_named_later(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch) as device:
        build(device).engine.fused.announce("one")
    assert lines == ["SAFusion: one."]


def test_it_says_nothing_elsewhere(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch) as device:
        build(device)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    build(torch.device("cpu"))
    assert not any("NCCL" in line for line in lines)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"collective": "hybrid"}, "collective='hybrid'"),
        ({"collective": "hierarchical"}, "collective='hierarchical'"),
        ({"collective": "hierarchical-sharded"}, "collective='hierarchical-sharded'"),
        ({"collective": "auto", "quota": "auto"}, "collective='sharded'"),  # the default with 16 workers
        ({"fusion": "horovod"}, "fusion='horovod'"),
    ],
)
def test_two_communicators_at_once_say_what_they_need(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], named: str
) -> None:
    with fake_cuda(monkeypatch) as device:
        build(device, Silent(16), **parts)
        (line,) = lines
        assert f"{named} uses two communicators at once" in line
        assert "NCCL_LAUNCH_ORDER_IMPLICIT=1" in line
        assert "CUDA_DEVICE_MAX_CONNECTIONS at 8 or more" in line
        lines.clear()
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        build(device, Silent(16), **parts)
        assert not lines
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "6")
        build(device, Silent(16), **parts)
        assert ["it is 6" in line for line in lines] == [True]


def test_naive_fusion_says_what_no_setting_mends(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with fake_cuda(monkeypatch) as device:
        build(device, Silent(2), fusion="naive")
    (line,) = lines
    assert "fusion='naive' launches at each worker's own pace" in line
    assert "SyncBatchNorm" in line


@pytest.mark.parametrize("parts", [{"collective": "allgather"}, {"collective": "auto", "quota": "auto"}])
def test_one_communicator_needs_nothing(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]
) -> None:
    with fake_cuda(monkeypatch) as device:
        build(device, Silent(8), **parts)
        build(device, Silent(1), collective="hybrid")
        gloo = Silent(8)
        gloo.stream_ordered = False
        build(device, gloo, collective="hybrid")
    build(torch.device("cpu"), Silent(8), collective="hybrid")
    assert not any("communicators" in line for line in lines)
