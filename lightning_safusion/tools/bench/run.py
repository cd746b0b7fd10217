"""``safusion bench``: measures systems side by side in a job of the user's, and says which to take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_safusion.systems import DEFAULT
from lightning_safusion.tools.bench.job import JobOptions
from lightning_safusion.tools.bench.own import ROWS, run_own


def run_bench(
    systems: Sequence[str] = (),
    config: Sequence[str] = (),
    model: str | None = None,
    data: str | None = None,
    cli: str | None = None,
    density: Sequence[float] = (),
    workers: int | None = None,
    rounds: int = 4,
    block: int = 6,
    warmup: int = 45,
    minutes: float = 10.0,
    keep_callbacks: Sequence[str] = (),
    seed: int = 0,
    calibrate: bool = True,
    output: Path = Path("safusion_bench"),
) -> None:
    """Measures systems side by side in a job of yours, and says which to take.

    "safusion bench --config config.yaml" (a file of LightningCLI) or "safusion bench --model package.module:Class
    --data package.module:Class", plain, under torchrun or under srun, on GPUs or CPUs. All rows train a few steps in
    turn on the same processes, from the same weights. It ends with a verdict, and with settings in best.yaml. Nothing
    is written to your loggers and checkpoints.

    The floor (no exchange at all), the floor with workers that wait for each other in every step, and DDP are always
    among the rows.

    Args:
        systems: Names, separated by commas; "safusion systems" lists them. With options: "saf-pooled[wire=bf16]".
        config: File of LightningCLI: the job to measure. Several are separated by commas; later ones win.
        model: A LightningModule, package.module:Class.
        data: A LightningDataModule, package.module:Class.
        cli: A LightningCLI of yours that links or adds arguments, package.module:Class.
        density: Densities of the default system that are compared, separated by commas; 0.02 and 0.1 by default.
        workers: Processes that train together on this machine; by default as the trainer or the launcher says.
        rounds: Turns of each system.
        block: Steps of a turn; the first does not count.
        warmup: Steps before the first turn of a system that learns.
        minutes: No round begins after so many minutes, but for the first.
        keep_callbacks: Classes of the job's callbacks that train with it. All others are left out, but for those of
            Lightning that change a training step and write nothing.
        seed: Of weights and batches, where the file has none.
        calibrate: Also record the trace of the job and the costs of its collectives, selection and decoding: files for
            "safusion plan --calibration FILE --trace FILE".
        output: Folder for the results: table, picture, settings, logs.

    Raises:
        ValueError: If a name or number makes no sense.
        ModuleNotFoundError: If an extra is missing; names it.
        RuntimeError: If DDP itself cannot train the job, or a process fails; names its log.
    """
    for share in density:
        if not 0 < share <= 1:
            raise ValueError(f"density is a share in (0, 1], got {share:g}")
    rows = tuple(systems) or tuple(row for row in ROWS if not density or "[density" not in row)
    options = JobOptions(
        config=tuple(config),
        model=model,
        data=data,
        cli=cli,
        systems=(*rows, *(f"{DEFAULT}[density={share:g}]" for share in density)),
        workers=workers,
        keep_callbacks=tuple(keep_callbacks),
        rounds=rounds,
        block=block,
        warmup=warmup,
        minutes=minutes,
        calibrate=calibrate,
        seed=seed,
        output=str(output),
    )
    run_own(options)
