"""Compiled kernels against NumPy and PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion.comm.wire.values import VALUES
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.cpu import Parts, Wanted, elements, library

COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
pytestmark = pytest.mark.skipif(
    not native.usable() and COMPILER is None, reason="the package was installed without a C compiler"
)
MAGNITUDE = 0x7FFFFFFF


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(library, "_SHARED", 1)
    monkeypatch.setattr(library, "_PART", 5000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return int(request.param)


def numbers(size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32)
    special = np.array([0.0, -0.0, 1e-44, -1e-44, 1e30, -1e30], np.float32)
    at = rng.integers(size, size=size // 7)
    x[at] = special[rng.integers(len(special), size=len(at))]
    return x


def test_they_are_there_where_there_is_a_compiler() -> None:
    assert native.usable(), f"{COMPILER} should have built them: install the package again (pip install -e . -v)"


def test_clang_exports_the_same_functions(tmp_path: Path) -> None:
    sources = Path(library.__file__).parent
    # Clang before 18 calls them "<name>.ifunc", and a library that lacks a function is not loaded
    exported = [line for path in sources.glob("*.c") for line in path.read_text().splitlines() if "CLONES" in line]
    assert exported
    assert all(line.startswith("CLONES static ") for line in exported)
    if (clang := shutil.which("clang")) is None:
        return
    made = tmp_path / "libkernels.so"
    options = ["-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-o", str(made)]
    subprocess.run([clang, *options, *map(str, sources.glob("*.c"))], check=True)
    ctypes.CDLL(str(made), mode=os.RTLD_NOW)


def decoded(entries: list[tuple[Tensor, Tensor]]) -> native.Together[native.Message]:
    return native.Together([native.Message.decoded(*both) for both in entries])


@pytest.mark.parametrize("sizes", [[1], [31], [32], [33], [4096], [4097], [0, 5, 0, 70_000, 1, 0], [12_345, 9999]])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_what_is_above_floors_is_found_in_order(threads: int, sizes: list[int], offset: int) -> None:
    x = numbers(sum(sizes) + offset)[offset:]
    edges = np.cumsum([0, *sizes])
    parts = Parts.between(edges.tolist())
    live = np.flatnonzero(np.diff(edges))
    for threshold in (0.0, 0.7, 2.9, 1e38):
        floors = np.full(len(live), np.float32(threshold)).view(np.int32)
        floors[::3] = -1  # everything
        found = native.survey(x, parts, Wanted(floors, len(x), "magnitudes"))
        mask = (x.view(np.int32) & MAGNITUDE) > np.repeat(floors, np.diff(edges)[live])
        assert found.lists.places.tolist() == np.flatnonzero(mask).tolist()
        assert np.array_equal(found.lists.bits, x.view(np.int32)[mask])
        cuts = edges[live]
        assert found.counts.tolist() == np.add.reduceat(mask, cuts, dtype=np.int64).tolist()
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(found.sums, np.add.reduceat(np.abs(x.astype(np.float64)), cuts), rtol=1e-5)
        counted = native.survey(x, parts, Wanted(floors, 0))
        assert counted.counts.tolist() == found.counts.tolist()
        assert (counted.lists is None) == bool(mask.any())


@pytest.mark.parametrize("room", [0, 1, 31, 32, 33, 99, 100])
def test_without_room_everything_is_counted_and_nothing_overwritten(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []

    def empty(size: int, dtype: type) -> np.ndarray:
        made.append(np.full(size + 64, 7, dtype))
        return made[-1][:size]

    monkeypatch.setattr(elements, "empty", empty)
    x = np.arange(1, 101, dtype=np.float32)
    found = native.survey(x, Parts.between([0, 50, 100]), Wanted(np.zeros(2, np.int32), room))
    assert found.counts.tolist() == [50, 50]
    assert (found.lists is None) == (room < 100)
    assert all((array[-64:] == 7).all() for array in made)


def test_sums_are_kept_in_double_precision(threads: int) -> None:
    x = np.full(3_000_000, 0.1, np.float32)
    found = native.survey(x, Parts.between([0, len(x)]), Wanted(sums="values"))
    np.testing.assert_allclose(found.sums, [float(x[0]) * len(x)], rtol=1e-6)
    np.testing.assert_allclose(found.squares, [float(x[0]) ** 2 * len(x)], rtol=1e-6)
    x[17] = np.nan
    found = native.survey(x, Parts.between([0, len(x)]), Wanted(sums="values"))
    assert np.isnan(found.sums).all()


def test_the_largest_magnitude(threads: int) -> None:
    x, parts = numbers(20_000), Parts.between([0, 1, 6000, 6000, 20_000])
    expected = [(x.view(np.int32)[low:high] & MAGNITUDE).max() for low, high in ((0, 1), (1, 6000), (6000, 20_000))]
    assert native.largest(x, parts).tolist() == expected
    x[7] = np.nan
    assert native.largest(x, parts)[1] > np.float32(np.inf).view(np.int32)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("bad", [None, 0, 16_000, 39_999])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_are_left_out(threads: int, decay: float, bad: int | None, value: float) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(size) for size in (5, 40_000, 1, 70_001)]
    grads[3][7] = 3e38  # is finite
    edges = np.cumsum([0, *map(len, grads)])
    memory = torch.randn(int(edges[-1]))
    before, expected = memory.clone(), decay * memory + torch.cat(grads)
    if bad is not None:
        grads[1][bad] = value
        expected[5:40_005] = before[5:40_005]
    left_out = native.add_finite(memory, Parts.between(edges.tolist()), grads, decay)
    assert left_out.left_out == ([] if bad is None else [1])
    torch.testing.assert_close(memory, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [0, 30_000, 32_767])
def test_what_is_found_soon_has_changed_nothing(bad: int) -> None:
    grad, memory = torch.randn(100_000), torch.randn(100_000)
    grad[bad], before = float("nan"), memory.clone()
    assert native.add_finite(memory, Parts.between([0, 100_000]), [grad], 0.9).left_out == [0]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("ranks", [0, 1, 2, 5])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("sizes", [[1], [40_000, 3, 300_000], [16_384, 16_385, 7]])
def test_means_are_bitwise_those_of_pytorch(threads: int, ranks: int, offset: int, sizes: list[int]) -> None:
    torch.manual_seed(ranks)
    grads = [torch.full((size + offset,), float("nan"))[offset:] for size in sizes]
    total, scale = sum(sizes), 1 / 3
    entries, expected = [], torch.zeros(total)
    for _ in range(ranks):
        indices = torch.randperm(total)[: max(1, total // 3)].sort().values
        values = torch.randn(len(indices))
        expected.scatter_add_(0, indices, values * scale)
        entries.append((indices, values))
    edges = [0, *np.cumsum(sizes).tolist()]
    parts, messages = Parts.between(edges), decoded(entries)
    assert native.mean_into(grads, parts, messages, scale)
    assert torch.equal(torch.cat(grads), expected)
    for piece in (1, 20_000, total):
        assert native.mean_by_pieces(grads, parts, lambda start, stop: messages, scale, piece)
        assert torch.equal(torch.cat(grads), expected)


def test_a_mean_that_overflows_is_noticed(threads: int) -> None:
    entries = [(torch.tensor([9_000]), torch.tensor([3e38]))] * 2
    grad = torch.empty(10_000)
    assert not native.mean_into([grad], Parts.between([0, 10_000]), decoded(entries), 1.0)
    assert grad[9_000] == float("inf")
    entries = [(torch.tensor([9_000]), torch.tensor([torch.nan]))]
    assert not native.mean_into([grad], Parts.between([0, 10_000]), decoded(entries), 1.0)


def test_what_was_sent_is_taken_out_in_turn() -> None:
    memory = torch.ones(10)
    native.take_out(memory, torch.tensor([3, 3, 7]), torch.tensor([0.25, 0.0, 2.0]))
    assert memory.tolist() == [1, 1, 1, 0.75, 1, 1, 1, -1, 1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_SHARED", 1)
    monkeypatch.setattr(library, "_PART", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, parts = numbers(1000), Parts.between([0, 1000])
    here = native.largest(x, parts)
    child = os.fork()
    if child == 0:
        os._exit(int(native.largest(x, parts).tolist() != here.tolist()))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("what", ["of another version", "no library"])
def test_a_library_that_does_not_fit_is_not_used(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "no library":
        built = next(Path(library.__file__).parent.glob("libkernels*"))
        shutil.copy(library.__file__, tmp_path / "library.py")
        (tmp_path / built.name).write_text(what)
        monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    else:
        monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    known = library.kernels, library.usable
    for each in known:
        each.cache_clear()
    try:
        assert not native.usable()
    finally:
        monkeypatch.undo()
        for each in known:
            each.cache_clear()
    assert native.usable()


def test_they_can_be_left_out_to_compare() -> None:
    with native.unused():
        assert not native.usable()
        assert not native.serves(torch.zeros(3))
    assert native.serves(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    assert not native.serves(torch.zeros(3, dtype=torch.float64))
    assert not native.serves(torch.zeros(6)[::2])


@pytest.mark.parametrize("name", ["q4", "q2", "sign"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 5000])
def test_codes_and_values_are_bitwise_those_of_numpy(name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    edges = [0, 10, 10, 40_000, 90_000]
    field = VALUES[name].field(max(count, 1), edges)
    indices = torch.from_numpy(np.sort(rng.choice(90_000, count, replace=False)))
    values = torch.from_numpy(numbers(count, 1) if count else np.empty(0, np.float32))
    values[: count // 3] = 0
    messages, sent, received = [], [], []
    for context in (contextlib.nullcontext(), native.unused()):
        with context:
            messages.append(torch.full((field.nbytes,), 255, dtype=torch.uint8))
            sent.append(field.write(indices, values.clone(), messages[-1]))
            received.append(field.read(indices, messages[-1]))
    assert torch.equal(messages[0], messages[1])
    unheard = torch.full((field.nbytes,), 7, dtype=torch.uint8)
    field.write(indices, values, unheard, echo=False)
    assert torch.equal(unheard, messages[0])
    assert torch.equal(sent[0].view(torch.int32), sent[1].view(torch.int32))
    assert torch.equal(received[0].view(torch.int32), received[1].view(torch.int32))
    assert torch.equal(sent[0], received[0])


def test_damaged_codes_are_refused() -> None:
    places, starts = np.arange(9), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="9 entries in 1 parts"):
        native.values(places, native.Codes(np.zeros(4, np.uint8), np.ones(1, np.uint16), starts, 4))
    with pytest.raises(ValueError, match="2 scales is damaged"):
        native.values(places, native.Codes(np.zeros(8, np.uint8), np.ones(2, np.uint16), starts, 4))


def test_positions_that_do_not_ascend_have_no_codes() -> None:
    starts, numbers = np.array([0, 10]), np.ones(3, np.float32)
    codes = native.Codes(np.zeros(4, np.uint8), np.zeros(2, np.uint16), starts, 4)
    for places in ([3, 2, 11], [3, 3, 11], [3, 11, 4]):
        assert not native.quantize(np.array(places), numbers, codes)
        assert not native.quantize(np.array(places, np.int32), numbers, codes)
        assert native.values(np.array(places), codes) is None
    assert native.quantize(np.array([3, 4, 11]), numbers, codes)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_what_has_no_scale_has_no_codes(bits: int, value: float) -> None:
    values = np.array([1, value, 1], np.float32)
    codes = native.Codes(np.zeros(4, np.uint8), np.zeros(1, np.uint16), np.zeros(1, np.int64), bits)
    assert not native.quantize(np.arange(3), values, codes) or (bits == 1 and value < 1e39)


def test_positions_that_do_not_rise_write_nowhere_else() -> None:
    grad = torch.full((50_000,), 7.0)
    entries = [(torch.tensor([20_000, 3, 49_999, 60_000, -4]), torch.ones(5))]
    native.mean_into([grad], Parts.between([0, 50_000]), decoded(entries), 1.0)
    assert set(grad.unique().tolist()) <= {0.0, 1.0}
