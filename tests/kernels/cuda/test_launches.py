"""How many launches a buffer costs, and that a GPU compiler takes the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from lightning_safusion.comm.wire import codec as codec_module
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels.cuda import launch as launch_module
from lightning_safusion.kernels.cuda import view as view_module
from lightning_safusion.kernels.cuda import wire as wire_module
from lightning_safusion.sparsify.registry import resolve_sparsifier
from lightning_safusion.sparsify.selection import select
from tests.sparsify.oracle import cut

pytestmark = pytest.mark.slow  # seconds each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Launches(TorchDispatchMode):
    """Counts the kernels of this package, and the operations of PyTorch that would start one."""

    _FREE = ("empty", "view", "split", "slice", "alias", "detach", "select", "as_strided", "unbind", "unsqueeze")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        if not name.startswith(self._FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counter = Launches()

    def counted(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        counter.names.append(kernel.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():  # the interpreter's own copies
            launch_module.launch(kernel, programs, *arguments, **constants)

    for module in (view_module, wire_module):
        monkeypatch.setattr(module, "launch", counted)
    monkeypatch.setattr(codec_module, "serves", lambda device: True)
    for name_of_view in ("NumpyView", "NativeView"):
        monkeypatch.setattr(select, name_of_view, lambda x, segments, *_: view_module.TritonView(x, segments))
    return counter


@pytest.mark.parametrize(
    ("name", "wire"),
    [("topk", "block16-fp32"), ("topk", "coo-fp16"), ("threshold", "block16-bf16"), ("topk", "bitmap-bf16")],
)
def test_seven_launches_select_and_pack_a_buffer_of_any_number_of_tensors(
    launches: Launches, name: str, wire: str
) -> None:
    sizes = 2 * [17, 64, 1]
    segments = cut(sizes, [max(1, size // 10) for size in sizes])
    x = torch.randn(sum(sizes), device=DEVICE)
    codec = resolve_codec(wire, segments.numel, segments.capacity, torch.float32)
    out = torch.empty(codec.nbytes, dtype=torch.uint8, device=DEVICE)
    sparsifier = resolve_sparsifier(name)
    codec.encode(sparsifier.select(x, segments, 0), out)  # copies the constants
    launches.names.clear()
    with launches:
        codec.encode(sparsifier.select(x, segments, 1), out)
    threshold = ["full"] if name == "threshold" else []
    kernels = ["survey", "narrow", "narrow", "mark", "write", f"encode_{wire.split('-')[0]}"]
    assert launches.names == [*threshold, "zeros", *kernels]


def test_a_pass_of_statistics_is_two_launches(launches: Launches) -> None:
    segments = cut([300, 5000, 7], [3, 50, 1])
    once = view_module.TritonView(torch.randn(5307, device=DEVICE), segments)
    once.moments()
    launches.names.clear()
    with launches:
        once.moments()
    assert launches.names == ["chunk_moments", "combine"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_without_a_device(tmp_path: Path, architecture: int) -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    root = str(program.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, str(program), str(architecture)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert {"survey", "narrow", "mark", "write", "encode_block16", "decode_block16"} <= set(ended.stdout.split())
