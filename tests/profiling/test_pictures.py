"""Pictures: bars are as long as their times."""

from __future__ import annotations

from io import BytesIO

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_safusion.profiling import pictures
from lightning_safusion.profiling.pictures import plot_step
from lightning_safusion.profiling.timeline import StepTimeline, WindowTimeline
from tests.profiling.steps import buffer, cpu_step, cuda_step, plain_step, unrecorded


def drawn(figure: object) -> Axes:
    assert isinstance(figure, Figure)
    figure.savefig(BytesIO())  # lays it out, and draws it for real
    return figure.axes[0]


def bars(axes: Axes, row: int) -> list[tuple[float, float]]:
    """Begin and end in milliseconds of the bars in a row."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            if box.width and abs((box.y0 + box.y1) / 2 - row) < 0.01:
                found.append((box.x0, box.x1))
    return sorted(found)


def test_every_buffer_has_a_row_and_the_latest_is_named() -> None:
    axes = drawn(plot_step(cpu_step()))
    assert bars(axes, 2) == [(11e3, 12e3), (12e3, 17e3), (15e3, 17e3), (17e3, 18e3)]  # the forward pass began at 1 s
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("training", "2 tensors, 0.3 kB", "3 tensors, 0.3 kB")
    ]
    (note,) = axes.texts
    assert note.get_text() == "2000.0 ms exposed: layer2.weight, layer3.weight, layer4.weight"
    assert note.xy[1] == 2
    assert axes.get_title(loc="left") == "step 7: 2000.0 ms of exchange exposed, 9% of 23000.0 ms"


def test_the_training_row_stops_for_what_is_done_in_the_backward_pass() -> None:
    on_cpu, on_cuda = (bars(drawn(plot_step(step)), 0) for step in (cpu_step(), cuda_step()))
    assert (5e3, 6e3) in on_cpu  # selection
    assert (5e3, 6e3) not in on_cuda
    assert (3e3, 15e3) in on_cuda  # the backward pass, until it waits


@pytest.mark.parametrize("step", [cuda_step(), plain_step(), unrecorded(cpu_step())])
def test_all_kinds_of_steps_can_be_drawn(step: StepTimeline) -> None:
    drawn(plot_step(step))


def test_many_buffers_have_no_labels_of_their_own() -> None:
    buffers = tuple(buffer(i, 1, (5 + i, 5.5 + i, 6 + i, 205, 205, 206)) for i in range(200))
    step = StepTimeline(1, 0.0, 210.0, cpu_step().phases, (WindowTimeline(buffers, 207.0, False),))
    axes = drawn(plot_step(step))
    assert axes.get_ylabel() == "buffers in launch order"
    assert axes.figure.get_size_inches()[1] < 20


@pytest.mark.parametrize(
    "times", [(5, 5.5, 206, 205, 206, 207), (20, 20.3, 22, 20.5, 22, 22.5), (204, 204.5, 208, 205, 208, 209)]
)
def test_the_name_of_the_latest_buffer_stays_within_the_axes(times: tuple[float, ...]) -> None:
    step = StepTimeline(1, 0.0, 210.0, cpu_step().phases, (WindowTimeline((buffer(0, 9, times),), 209.0, False),))
    axes = drawn(plot_step(step))
    (note,) = axes.texts
    assert "exposed" in note.get_text()
    assert axes.bbox.x0 <= note.get_window_extent().x0
    assert note.get_window_extent().x1 <= axes.bbox.x1


def test_it_draws_into_given_axes() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    assert plot_step(cpu_step(), axes) is figure
    assert axes.collections


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for draw in (lambda: plot_step(cpu_step()), lambda: pictures.plot_rates(["a"], [1], [(0.0,)])):
        with pytest.raises(ModuleNotFoundError, match=r"lightning-safusion\[plot\]"):
            draw()


def test_the_heat_map_is_grey_where_there_was_no_gradient() -> None:
    axes = pictures.plot_rates(["a", "b"], [1, 2], [(0.0, 1.0), (None, 0.25)]).axes[0]
    (image,) = axes.images
    assert image.get_array().filled(-1.0).tolist() == [[0.0, 1.0], [-1.0, 0.25]]  # type: ignore[union-attr]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
