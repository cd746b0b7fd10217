"""The sections of a report: each makes a part of the page from what is known of a run, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from lightning_safusion.advice import Advice, JobFigures, advise
from lightning_safusion.callbacks.tuner import describe
from lightning_safusion.report import pictures
from lightning_safusion.report.elements import (
    counted,
    figure,
    fold,
    milliseconds,
    scrolled,
    section,
    share,
    signed,
    size,
    table,
)
from lightning_safusion.report.load import BufferRow, MissingTensor, Overlap, Run
from lightning_safusion.report.markup import Markup, element, join

_SHOWN_TENSORS = 2
_HEAT_ROWS = 60
_WORST = 15
_MARKS = {"good": "Good.", "hint": "Hint.", "warning": "Warning."}


def headline(run: Run) -> Markup:
    """The figures that say whether it pays."""
    overlap, mean = run.overlap, run.overlap.mean
    cards = [("Step", milliseconds(mean.step_s), f"mean over {counted(len(overlap.ranks), 'worker')}")]
    if not isnan(mean.exposed_s):
        part = mean.exposed_s / mean.step_s if mean.step_s > 0 else 0.0
        cards.append(("Exposed exchange", milliseconds(mean.exposed_s), f"{part:.1%} of a step waits for it alone"))
    if not isnan(mean.overlap_ratio):
        cards.append(("Overlap", share(mean.overlap_ratio, 0), "of the exchange ran beside computation"))
    if not isnan(mean.bytes_sent):
        cards.append(("Sent", size(mean.bytes_sent), _against_dense(overlap)))
    if run.missing is not None:
        cards.append(("Missing tensors", share(run.missing.rate), "of which a worker sent nothing in a step"))
    if len(overlap.ranks) > 1:
        rank, behind = overlap.slowest
        cards.append(("Slowest worker", f"rank {rank}", f"{milliseconds(behind)} more work than the median"))
    items = [
        element("div", element("dt", name), element("dd", _span("value", value), _span("detail", detail)))
        for name, value, detail in cards
    ]
    return section("figures", "In short", element("dl", *items, class_="figures"))


def _against_dense(overlap: Overlap) -> str:
    if overlap.costs is None:
        return "by a worker in a step"
    dense = sum(overlap.costs.dense_bytes)
    part = overlap.mean.bytes_sent / dense if dense else 0.0
    return f"by a worker in a step, {part:.1%} of the gradients' {size(dense)}"


def remarks(run: Run) -> list[Advice]:
    """What the figures say in plain words."""
    overlap, mean = run.overlap, run.overlap.mean
    if overlap.plain_ddp is not None:
        return [Advice("good", f"Plain DDP exchanges the gradients: {overlap.plain_ddp}.")]
    if isnan(mean.exposed_s) or overlap.density is None:
        return [Advice("warning", "No exchange was recorded: train for more steps, or record more of them.")]
    return advise(
        JobFigures(
            step_s=mean.step_s,
            exposed_s=mean.exposed_s,
            density=overlap.density,
            bytes_sent=mean.bytes_sent,
            missing_rate=None if run.missing is None else run.missing.rate,
            slowest_rank=overlap.slowest,
            plan=overlap.plan,
            costs=overlap.costs,
        )
    )


def advice(run: Run) -> Markup:
    """The remarks as a list."""
    items = [element("li", _span("level", _MARKS[each.level]), each.text, class_=each.level) for each in remarks(run)]
    model = "Predictions come from the cost model that the plan was made from."
    note = Markup("") if run.overlap.costs is None else element("p", model, class_="note")
    return section("advice", "Advice", element("ul", *items, class_="advice"), note)


def timeline(run: Run) -> Markup:
    """The picture of one step."""
    step = run.overlap.timeline
    if step is None:
        return Markup("")
    latest, seconds = pictures.longest_wait(step)
    late = ""
    if latest >= 0:
        names = ", ".join(step.buffers[latest].tensors[:_SHOWN_TENSORS])
        others = len(step.buffers[latest].tensors) - _SHOWN_TENSORS
        names += f" and {others} more" if others > 0 else ""
        late = f" The longest wait of this step is {milliseconds(seconds)}, for buffer {latest + 1} ({names})."
    caption = f"Step {step.step} on rank 0; this package exchanged nothing in it."
    if step.buffers:
        caption = (
            f"Step {step.step} on rank 0. A row is a buffer, from the first to be sent to the last; the top row is the "
            "training loop. A buffer is late where its exchange reaches beyond the backward pass; the reason is to its "
            f"left: late gradients, a long selection, a long exchange, or exchanges before it.{late}"
        )
    parts = ("ready", "forward", "backward", "select", "exchange", "exposed", "decode", "optimizer")
    drawing = figure("Timeline of a step", pictures.timeline(step), caption, _legend(parts, ready="gradient ready"))
    return section("timeline", "A step, buffer by buffer", drawing)


def breakdown(run: Run) -> Markup:
    """Where the time of a step goes: a bar for each rank, and the means as a table."""
    overlap, mean = run.overlap, run.overlap.mean
    rows = []
    for part in pictures.PARTS:
        seconds = getattr(mean, f"{part}_s")
        if not isnan(seconds):
            name = element("th", _swatch(part), _PARTS[part], scope="row", class_="name")
            part_of = share(seconds / mean.step_s if mean.step_s > 0 else None)
            rows.append([name, milliseconds(seconds, 2), part_of])
    caption = "Means over the latest recorded steps. "
    if len(overlap.ranks) > pictures.RANKS:
        caption += f"The first {pictures.RANKS} of {len(overlap.ranks)} ranks are drawn. "
    if overlap.device == "cuda":
        caption += "Selection and decoding run beside the backward pass: the parts may add up to more than the step."
    drawing = figure("Parts of a step by rank", pictures.breakdown(overlap.ranks), caption)
    parts = scrolled("Parts of a step", table(("part", "mean over ranks", "share of the step"), rows))
    content = [drawing, parts]
    if len(overlap.steps) > 1:
        note = "Recorded steps of rank 0: the whole step (blue) and the exposed exchange in it (red)."
        content.append(figure("Step time over the run", pictures.history(overlap.steps), note))
    return section("breakdown", "Where the time goes", *content)


_PARTS = {
    "data": "between batches (data loading)",
    "forward": "forward",
    "backward": "backward",
    "select": "selection and packing",
    "exposed": "exposed exchange",
    "decode": "decoding",
    "optimizer": "optimizer",
    "other": "everything else",
}


def plan(run: Run) -> Markup:
    """The buffers."""
    buffers = run.overlap.buffers
    if not buffers:
        return Markup("")
    latest = max(range(len(buffers)), key=lambda number: _known(buffers[number].exposed_s))
    late = latest if _known(buffers[latest].exposed_s) > 0 else -1
    heads = ("", "tensors", "elements", "sent", "collective", "ready at", "select", "exchange", "exposed", "decode")
    rows = [_buffer_cells(number, buffer) for number, buffer in enumerate(buffers)]
    count = sum(len(buffer.tensors) for buffer in buffers)
    note = (
        f"{counted(count, 'tensor')} in {counted(len(buffers), 'buffer')}. Means over recorded steps on rank 0; "
        "times of readiness count from the beginning of the backward pass. The buffer with the longest exposed "
        "exchange is marked."
    )
    listing = fold(len(rows), "Buffers", table(heads, rows, marked=late, name_column=1))
    return section("plan", "The plan", element("p", note, class_="note"), listing)


def _known(seconds: float) -> float:
    return 0.0 if isnan(seconds) else seconds


def _buffer_cells(number: int, buffer: BufferRow) -> list[str]:
    seconds = (buffer.ready_s, buffer.select_s, buffer.exchange_s, buffer.exposed_s, buffer.decode_s)
    return [
        element("th", str(number + 1), scope="row"),
        element("td", tensor_names(buffer.tensors), class_="name"),
        f"{buffer.elements:,}",
        size(buffer.bytes_sent),
        buffer.collective,
        *(milliseconds(each, 2) for each in seconds),
    ]


def tensor_names(names: Sequence[str]) -> Markup:
    """The names, those after the first ones folded."""
    if len(names) <= _SHOWN_TENSORS:
        return join([", ".join(names)])
    summary = element("summary", f"{names[0]} and {len(names) - 1} more")
    return element("details", summary, ", ".join(names[1:]))


def tuning(run: Run) -> Markup:
    """What was decided on the buffers' sizes, and what came of it."""
    decisions = run.overlap.decisions
    if not decisions:
        return Markup("")
    heads = ("window", "decision", "predicted gain", "measured gain", "window before")
    rows = [
        [
            element("th", f"{each.window:,}", scope="row"),
            element("td", element("strong", each.action), f": {describe(each)}", class_="name"),
            signed(each.predicted),
            signed(each.measured),
            milliseconds(each.seconds, 2),
        ]
        for each in decisions
    ]
    note = (
        "A window is a backward pass with its exchange, and a gain is a share of it. A change is kept only if the "
        "clock confirms it."
    )
    listing = fold(len(rows), "Decisions", table(heads, rows, name_column=1))
    return section("tuning", "Buffer sizes over the run", element("p", note, class_="note"), listing)


def missing(run: Run) -> Markup:
    """Which tensors went missing."""
    data = run.missing
    if "missing_rate.json" in run.stale:
        text = (
            "missing_rate.json is of another training than overlap.json, and is left out: the one of this page ran "
            "without TensorMissingRateMonitor, or sampled nothing."
        )
        return section("missing", "Missing tensors", element("p", text))
    if data is None:
        return Markup("")
    steps = counted(data.samples, "sampled step")
    absent = [each for each in data.tensors if each.missing > 0]
    if not absent:
        text = f"No tensor went missing in {steps}: something of each of {len(data.tensors)} was sent in every step."
        return section("missing", "Missing tensors", element("p", text))
    worst = sorted(absent, key=lambda each: (-each.missing, -each.everywhere))
    drawn = {each.name for each in worst[:_HEAT_ROWS]}
    lines = [each for each in data.tensors if each.name in drawn]
    caption = (
        f"{share(data.rate, 2)} of the tensors, over {steps} and all ranks: {len(absent)} of {len(data.tensors)} were "
        "missing at some time"
        + (f"; the {len(lines)} worst are drawn, in registration order." if len(lines) < len(absent) else ".")
    )
    drawing = pictures.heat_map([each.name for each in lines], data.steps, [each.rates for each in lines])
    heads = ("tensor", "missing", "on all ranks", "density", "energy left behind")
    listing = scrolled("Worst tensors", table(heads, [_missing_cells(each) for each in worst[:_WORST]]))
    legend = _legend(("shade", "absent"), shade="missing on all ranks and steps", absent="no gradient")
    return section("missing", "Missing tensors", figure("Missing rates", drawing, caption, legend), listing)


def _missing_cells(row: MissingTensor) -> list[str]:
    name = element("th", row.name, scope="row", class_="name")
    return [name, share(row.missing), share(row.everywhere), share(row.density, 2), share(row.error)]


def settings(run: Run) -> Markup:
    """Settings and versions."""
    overlap = run.overlap
    about = {"system": overlap.system, "workers": overlap.world_size, "device": overlap.device}
    groups = [("Strategy", {**about, **overlap.settings}), ("OverlapProfiler", overlap.profiler)]
    groups.append(("Versions", overlap.versions))
    tables = [fold(0, name, _pairs(values), open_=name == "Strategy") for name, values in groups]
    return section("settings", "Settings and versions", *tables)


def _pairs(values: Mapping[str, object]) -> Markup:
    rows = [
        [element("th", name, scope="row", class_="name"), element("td", element("code", str(value)), class_="name")]
        for name, value in values.items()
    ]
    return table(("name", "value"), rows, name_column=None)


def reproduce(run: Run) -> Markup:
    """How to make the run and this page again."""
    pins = " ".join(f"{name.replace('_', '-')}=={version}" for name, version in run.overlap.versions.items())
    return section(
        "reproduce",
        "How to make it again",
        element("p", "The run was started with"),
        element("pre", element("code", run.overlap.command)),
        element("p", "with"),
        element("pre", element("code", pins)),
        element("p", "and this page was made with"),
        element("pre", element("code", f"safusion report {run.folder}")),
    )


def _legend(parts: Sequence[str], **names: str) -> Markup:
    items = [element("li", _swatch(part), names.get(part, _PARTS.get(part, part))) for part in parts]
    return element("ul", *items, class_="legend")


def _swatch(part: str) -> Markup:
    return element("span", class_=f"swatch {part}", aria_hidden="true")


def _span(class_: str, content: str) -> Markup:
    return element("span", content, class_=class_)
