"""Runs the stages one after the other, each in a process of its own, and writes what they found.

    $ python3 -m lab gpu --set first --output gpu/first
    $ python3 -m lab gpu --set first --output rehearsal/first --rehearse

A stage that fails, hangs or runs too long is ended with all of its processes and reported with the figures that it had
found; the others go on. Files and the archive of all of them are written after every stage, and once more before the
exit status is decided: Ctrl-C leaves what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lab.gpu.archive import CACHE, archive
from lab.gpu.figures import Figure, Lines
from lab.gpu.page import page
from lab.gpu.stages import LIMIT, REHEARSAL_FACTOR, ROOT, SETS, STAGES, UNFIT, stages_of
from lightning_safusion.lookup import check_name

_GRACE = 10.0  # seconds in which a killed process is gone
_SAID = 4  # last lines of what a stage has printed, where it did not end well


@dataclass(frozen=True)
class Outcome:
    """What became of a stage.

    Args:
        name: Of the stage.
        state: ``"done"``, ``"failed"``, ``"timed out"``, ``"stopped"`` by the user, ``"unfit"`` (the machine lacks what
            all stages need), or ``"not run"``.
        seconds: It took.
        figures: That it found.
        why: The last lines of what it printed, if it is not done.
    """

    name: str
    state: str
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    why: str = ""


def run_stage(name: str, folder: Path, rehearse: bool, seconds: float) -> Outcome:
    """Runs a stage in a process of its own, which is ended after so many seconds, or by Ctrl-C."""
    lines, log = Lines(folder / f"{name}.jsonl"), folder / f"{name}.log"
    lines.path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lab.gpu.stage", STAGES[name].function, str(lines.path)]
    command += ["--rehearse"] if rehearse else []
    begin, state = time.perf_counter(), "done"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(folder, rehearse), stdout=output, stderr=output, start_new_session=True
        )
        try:
            if (status := process.wait(seconds)) != 0:
                state = "unfit" if status == UNFIT else "failed"
        except subprocess.TimeoutExpired:
            state = "timed out"
        except KeyboardInterrupt:
            state = "stopped"
        finally:
            _end(process)
    said = {"done": 0, "unfit": 1}.get(state, _SAID)
    why = "\n".join(log.read_text(errors="replace").splitlines()[-said:]) if said else ""
    return Outcome(name, state, time.perf_counter() - begin, tuple(lines.read()), why)


def _environment(folder: Path, rehearse: bool) -> dict[str, str]:
    """Variables of a stage: kernels are made for the interpreter or the compiler when Triton is imported."""
    wanted = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    wanted["TRITON_INTERPRET"] = "1" if rehearse else "0"
    # workers are on this machine, whose name may have no address
    wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    if rehearse:
        wanted |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {"TRITON_CACHE_DIR": str(folder / CACHE)} | os.environ | wanted


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a stage and all that it has started; one that hangs in its driver is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)


def gpu(output: Path, rehearse: bool = False, stages: Sequence[str] = (), patience: float = 1.0) -> None:
    """What a GPU must show, in sets of stages: numbers, times, waits, races, two processes, each beside its budget.

    Args:
        output: Folder for the figures (gpu.json), a page of them (gpu.md), the device's costs (device-costs.json, which
            the simulator reads), and what every stage prints. An archive of it is written beside it.
        rehearse: Run every stage on the CPU, with Triton's interpreter and small sizes: nothing is measured.
        stages: Their names; all by default.
        patience: Factor on the limits of time, for a device that others use as well.

    Raises:
        RuntimeError: If there is no CUDA device, and it is no rehearsal; if a stage did not end well, or a figure is
            outside its budget.
        ValueError: If a stage is unknown.
    """
    for name in stages:
        check_name("stage", name, STAGES)
    if not rehearse:
        _need_device()
    elif (pair := refused_pair()) is not None:
        print(pair, flush=True)
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    (output / "device-costs.json").unlink(missing_ok=True)
    outcomes: list[Outcome] = []
    # whoever ends this process ends the stage as well
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for outcome in _outcomes(stages or tuple(STAGES), output, rehearse, patience):
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.state} in {outcome.seconds:.0f} s", flush=True)
            _write(output, outcomes, rehearse)
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # the archive is written whatever comes
        print(f"archive: {_write(output, outcomes, rehearse)}", flush=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    _judge(output, outcomes, rehearse)


def _outcomes(names: Sequence[str], output: Path, rehearse: bool, patience: float) -> Iterator[Outcome]:
    """Runs stages until the user stops one, the machine turns out to be unfit, or the time of all is over."""
    left, ended = float("inf") if rehearse else LIMIT * patience, ""
    for name in names:
        if left <= 0:
            ended = ended or f"the {LIMIT * patience:.0f} seconds of a call were over"
        if ended:
            yield Outcome(name, "not run", why=ended)
            continue
        limit = STAGES[name].seconds * patience * (REHEARSAL_FACTOR if rehearse else 1.0)
        outcome = run_stage(name, output, rehearse, min(limit, left))
        left -= outcome.seconds
        ended = {"stopped": "the run was stopped", "unfit": outcome.why}.get(outcome.state, "")
        yield outcome


def _need_device() -> None:
    import torch  # not before the arguments are known to be right: it takes seconds

    if not torch.cuda.is_available():
        raise RuntimeError(
            "this needs a CUDA device, and PyTorch sees none here: nothing was measured. --rehearse runs all stages on "
            "the CPU"
        )


def refused_pair() -> str | None:
    """Says that Triton's interpreter does not run with this NumPy; None if it does.

    Up to Triton 3.6 it reads arrays of one element as numbers, which NumPy refuses from 2.4 on.
    """
    try:
        found = [version(package) for package in ("triton", "numpy")]
    except PackageNotFoundError:
        return None
    triton, numpy = (tuple(map(int, each.split(".")[:2])) for each in found)
    if triton > (3, 6) or numpy < (2, 4):
        return None
    return (
        f"the interpreter of Triton {found[0]} does not run with NumPy {found[1]}: every stage that has kernels will "
        "fail. Rehearse with NumPy 2.3, or with Triton 3.9; a device does not mind"
    )


def _write(output: Path, outcomes: Sequence[Outcome], rehearse: bool) -> Path:
    """Writes page, figures and the archive of all files."""
    content = {"rehearsal": rehearse, "command": sys.argv, "stages": [asdict(outcome) for outcome in outcomes]}
    (output / "gpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (output / "gpu.md").write_text(page(outcomes, rehearse, (output / "device-costs.json").exists()), encoding="utf-8")
    return archive(output)


def _judge(output: Path, outcomes: Sequence[Outcome], rehearse: bool) -> None:
    """Raises :class:`RuntimeError` if something is not as it must be."""
    bad = [outcome.name for outcome in outcomes if outcome.state != "done"]
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    outside = [
        figure.name for figure in figures if figure.holds is False and (figure.kind != "measured" or not rehearse)
    ]
    print(f"written: {output / 'gpu.md'}")
    if bad or outside:
        parts = [f"not done: {', '.join(bad)}"] * bool(bad) + [f"outside: {', '.join(outside)}"] * bool(outside)
        raise RuntimeError("; ".join(parts))


def main(args: Sequence[str]) -> None:
    """The command line, which needs nothing but Python: a machine with a GPU may not have the packages of others."""
    parser = argparse.ArgumentParser("python -m lab gpu", description=(gpu.__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for figures, page, costs and logs")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: nothing is measured")
    about = "factor on the limits of time, for a device that others use as well"
    parser.add_argument("--patience", type=float, default=1.0, help=about)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--set", choices=SETS, help="stages that belong together, in at most 8 minutes")
    which.add_argument("--stages", default="", help=f"some of {','.join(STAGES)}")
    given = parser.parse_args(args)
    try:
        stages = stages_of(given.set) if given.set else tuple(filter(None, given.stages.split(",")))
        gpu(given.output, given.rehearse, stages, given.patience)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"python -m lab: {error}")
