"""How gradients are compressed, and what the optimizer does about it: one value for every configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lab.convergence.adaptive import ClippedResidual
from lightning_safusion.fusion.plans.policy import Aligned, Single
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.lookup import SelectBy, check_name
from lightning_safusion.notation import hints_of, make_part, read, typed
from lightning_safusion.sparsify import Memory, resolve_density, resolve_memory, resolve_sparsifier
from lightning_safusion.sparsify.schedule import DenseStart, DensitySchedule, ExponentialRamp

Method = Literal[
    "dense", "behind", "ahead", "shared", "pooled", "auto", "bf16", "powersgd", "demo", "sparseloco", "scape"
]
#: Methods that are not the engine's.
REFERENCES = ("dense", "bf16", "powersgd", "demo", "sparseloco", "scape")
#: Those among them that make steps, not gradients.
STEPPING = ("demo", "sparseloco", "scape")


@dataclass(frozen=True)
class Scheme:
    """One configuration. Parts are named as in ``SAFusionStrategy``, with options in brackets: ``residual[decay=0.9]``.

    Args:
        method: ``"dense"`` averages plainly; ``"behind"``, ``"ahead"`` and ``"pooled"`` select from the fused buffer,
            from every tensor, and from every tensor with pooled quotas; ``"shared"`` with shared quotas; ``"auto"``
            as ``quota="auto"`` and ``select_by="auto"`` do; ``"bf16"``, ``"powersgd"``, ``"demo"``,
            ``"sparseloco"`` and ``"scape"`` are references.
        density: Share of the elements that is sent.
        memory: Error feedback.
        compressor: Chooses the elements.
        degree: Tensors in a buffer; 0 puts all into one.
        dense_below: Tensors of fewer elements are dense.
        wire: Format of the messages.
        dense_start: Share of the steps, the first ones, in which everything is sent.
        ramp: Share of the steps in which the density falls exponentially from ``ramp_from``.
        ramp_from: Density in the first step of the ramp.
        workers: Virtual workers; they share the global batch.
        parts: How many parts of it each gets, such as ``1|3``, weighted by samples; empty: one.
        rank: Of PowerSGD's approximations.
        lr_scale: Factor on the task's learning rate.
        momentum: In place of the task's; the first beta of AdamW, and the decay of DeMo's momentum (usually 0.999).
        beta2: In place of the task's, of AdamW.
        select_by: Units in which elements are compared.
        frozen: Share of the steps after which AdamW's second moment stays as it is; 0: never.
        collective: How selections reach all workers; sparse at any cost, since compression is compared.

    Raises:
        ValueError: If a value is out of its range, or the parts do not go together.
    """

    method: Method
    density: float = 0.01
    memory: str = "residual"
    compressor: str = "topk"
    degree: int = 8
    dense_below: int = 0
    wire: str = "auto"
    dense_start: float = 0.0
    ramp: float = 0.0
    ramp_from: float = 0.25
    workers: int = 2
    parts: str = ""
    rank: int = 4
    lr_scale: float = 1.0
    momentum: float | None = None
    beta2: float | None = None
    select_by: SelectBy = "gradient"
    frozen: float = 0.0
    collective: str = "allgather"

    def __post_init__(self) -> None:
        check_name("method", self.method, get_args(Method))
        if self.degree < 0 or self.workers < 1 or self.rank < 1:
            raise ValueError(
                f"degree must be 0 or more, workers and rank 1 or more, got {self.degree}, {self.workers}, {self.rank}"
            )
        if self.parts and len(self.shares) != self.workers:
            raise ValueError(f"parts={self.parts!r} are for {len(self.shares)} workers, not for {self.workers}")
        for name in ("dense_start", "ramp", "frozen"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share of the steps, in [0, 1], got {getattr(self, name)}")
        if self.sparse:
            self.settings(1)  # refuses what the engine refuses, before anything is trained

    @property
    def sparse(self) -> bool:
        """Whether the engine compresses; otherwise averaging is dense, or a reference's."""
        return self.method not in REFERENCES

    @property
    def shares(self) -> list[int]:
        """The parts as numbers."""
        return [int(part) for part in self.parts.split("|") if part]

    def options(self) -> dict[str, Any]:
        """The fields that differ from their defaults, method first; from them the scheme can be made again."""
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: changed[f.name] for f in fields(self) if f.name == "method" or changed[f.name] != f.default}

    @property
    def name(self) -> str:
        """The scheme in one word, unique among schemes: ``ahead[dense_below=512]``; :func:`parse_scheme` reads it."""
        _, *options = (f"{key}={value}" for key, value in self.options().items())
        return f"{self.method}[{','.join(options)}]" if options else self.method

    def schedule(self, steps: int) -> DensitySchedule:
        """Density by step.

        Args:
            steps: Of the whole training.
        """
        schedule = resolve_density(self.density)
        dense, ramp = round(self.dense_start * steps), round(self.ramp * steps)
        if ramp:
            schedule = ExponentialRamp(self.ramp_from, self.density, ramp)
        return DenseStart(schedule, dense) if dense else schedule

    def settings(self, steps: int) -> EngineSettings:
        """The engine's settings; new parts at every call, since parts hold state.

        Args:
            steps: Of the whole training.
        """
        return EngineSettings(
            compressor=make_part(self.compressor, resolve_sparsifier),
            density=self.schedule(steps),
            fusion=Aligned(self.degree) if self.degree else Single(),
            memory=make_part(self.memory, _memory),
            scope="group" if self.method == "behind" else "tensor",
            quota=self.method if self.method in ("auto", "shared", "pooled") else "proportional",
            collective=self.collective,
            wire=self.wire,
            select_by="auto" if self.method == "auto" else self.select_by,
        )


def _memory(name: str) -> Memory:
    return ClippedResidual() if name == ClippedResidual.name else resolve_memory(name)


def parse_scheme(text: str) -> Scheme:
    """Reads a scheme: ``pooled[density=0.02,memory=residual[decay=0.9]]``.

    Raises:
        ValueError: If there is no such method or option, or it cannot have that value.
    """
    method, options = read(text)
    return Scheme(**{"method": method, **typed(text, options, hints_of(Scheme.__init__, without=("method",)))})
