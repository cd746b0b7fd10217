"""Virtual workers: the engine of training, once for each of them, in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import repeat

import torch
from torch import Tensor
from torch.optim import Optimizer

from lab.virtual.transport import local_transports
from lightning_safusion.comm.collectives.multiphase import MultiPhaseExchange
from lightning_safusion.fusion.build import JobTraits, build_engine
from lightning_safusion.fusion.ending.device import DeviceEnding
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.lanes import Lane
from lightning_safusion.fusion.layout import TensorSpec
from lightning_safusion.fusion.settings import EngineSettings
from lightning_safusion.fusion.shipment import Shipment
from lightning_safusion.fusion.window import Outcome, Window
from lightning_safusion.integration.momentum import MomentumSwitch
from lightning_safusion.integration.optimizer import fit_to_optimizers, suited
from lightning_safusion.metrics.figures import TensorFigures, window_figures

# Steps from one comparison of all workers' results to the next.
_COMPARED_EVERY = 50
_CPU = torch.device("cpu")


class Averager(ABC):
    """Makes one gradient of those of all workers.

    Attributes:
        bytes_sent: What a worker gave to the collectives in the latest step.
    """

    bytes_sent: int

    @abstractmethod
    def average(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """The mean that every worker gets, by registration index; the gradients may be overwritten."""

    def carry_momentum(self, optimizers: Sequence[Optimizer], params: Sequence[Tensor]) -> None:  # noqa: B027 - optional
        """Has memories carry the momentum of optimizers, as the strategy does.

        Args:
            optimizers: Step with what the workers get.
            params: By registration index.
        """

    def close(self) -> None:  # noqa: B027 - optional: most averagers have nothing to end
        """Ends threads, and leaves the optimizer as it was made."""


class Dense(Averager):
    """Plain averages.

    Args:
        specs: The tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.bytes_sent = sum(spec.numel * spec.dtype.itemsize for spec in specs)

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        means = list(gradients[0])
        for others in gradients[1:]:
            torch._foreach_add_(means, list(others))
        torch._foreach_div_(means, len(gradients))
        return means


class Rounded(Averager):
    """Averages in 16 bits, as torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` make them.

    Every worker rounds its gradient and divides it; sums are rounded too, in rank order. (Between more than two
    processes a ring adds some parts in another order.)

    Args:
        specs: The tensors.
        dtype: Of what is sent.
    """

    def __init__(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.bytes_sent = sum(spec.numel * dtype.itemsize for spec in specs)

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        means = []
        for of_all in zip(*gradients, strict=True):
            shares = [gradient.to(self._dtype).div_(len(of_all)) for gradient in of_all]
            means.append(reduce(torch.add, shares).to(torch.float32))
        return means


class _LateEnding(DeviceEnding):
    """Decodes at the end of a window, when all workers have sent: one thread serves all of them, on one stream.

    Args:
        engine: Whose windows it ends.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.space, engine.transport, engine.fused)
        self._lane = self._arrivals = self._phases = Lane(_CPU)  # no streams: all work is in the order of the caller's
        self._late: list[Shipment] = []

    def launched(self, shipment: Shipment) -> None:
        self._late.append(shipment)

    def run(self, window: Window, shipments: Sequence[Shipment]) -> Outcome:
        late, self._late = self._late, []
        for shipment in late:
            super().launched(shipment)
        return super().run(window, shipments)


class Engines(Averager):
    """One engine per worker, over in-process transports.

    Args:
        make_settings: Called once per worker: parts hold state.
        specs: The tensors.
        order: Registration indices in the order in which gradients become ready.
        workers: Virtual workers.
        device: Where gradients live.
        deferred: The device ends windows, with fused kernels where they serve; not for exchanges in several phases.
        optimizers: Step with what the workers get; ``memory="auto"`` depends on them.

    Attributes:
        bytes_sent: What the first worker gave to the collectives in the latest step, messages as they are.
    """

    def __init__(
        self,
        make_settings: Callable[[], EngineSettings],
        specs: Sequence[TensorSpec],
        order: Sequence[int],
        workers: int,
        device: torch.device = _CPU,
        deferred: bool = False,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.order = list(order)
        self.bytes_sent = 0
        self._steps = 0
        self._switches: list[MomentumSwitch] = []
        self._settings = suited(make_settings(), optimizers)
        self._pool = ThreadPoolExecutor(workers)
        transports = local_transports(workers)
        settings = [suited(make_settings(), optimizers) for _ in range(workers)]
        # exchanges in several phases wait for each other while they are launched
        self._waiting = issubclass(settings[0].collective_over(workers).exchange, MultiPhaseExchange)
        self.by_worker: list[Engine] = list(
            self._pool.map(
                lambda rank: build_engine(
                    settings[rank], specs, transports[rank], device, JobTraits(measure=False, deferred=deferred)
                ),
                range(workers),
            )
        )
        for engine in self.by_worker if deferred else ():
            engine.launching.lane, engine.ending = Lane(_CPU), _LateEnding(engine)

    def average(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        ranks, first = range(len(gradients)), self.by_worker[0]
        at_end = first._reviews_at_end or first.dense or self._waiting
        if at_end and self.agrees():
            list(self._pool.map(self._window, ranks, gradients))
        else:
            if not at_end:  # what is agreed on begins a window; one thread compiles and launches the kernels
                list(self._pool.map(self._push, ranks, gradients, repeat(slice(1))))
            for rank, mine in enumerate(gradients):
                self._push(rank, mine, slice(0 if at_end else 1, None))
            for engine in self.by_worker:
                engine.drain()
        if self._steps % _COMPARED_EVERY == 0:
            self._compare(gradients)
        self._steps += 1
        if (report := self.by_worker[0].record) is not None:
            self.bytes_sent = report.bytes_sent
        return gradients[0]

    def agrees(self) -> bool:
        """Whether the workers will wait for each other in the coming window, to agree on a new plan or in an exchange.

        Otherwise one thread serves all of them, which is faster: messages of all are sent before any is waited for.
        """
        engine = self.by_worker[0]
        _, density = engine.densities()
        reviews = engine.space.shares_due(engine.windows)
        planned = engine.planner.current is not None and density == engine.space.quotas.density
        return self._waiting or reviews or not planned

    def _window(self, rank: int, gradients: Sequence[Tensor]) -> None:
        self._push(rank, gradients, slice(None))
        self.by_worker[rank].drain()

    def _push(self, rank: int, gradients: Sequence[Tensor], part: slice) -> None:
        """Gives a worker's engine a part of its gradients, in their order."""
        for index in self.order[part]:
            self.by_worker[rank].push(index, gradients[index])

    def _compare(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Raises if workers did not all get the same, bit for bit; a device is read once."""
        differs = [
            (mine.view(torch.int32) != other.view(torch.int32)).any()
            for theirs in gradients
            for mine, other in zip(gradients[0], theirs, strict=True)
        ]
        for place in torch.stack(differs).nonzero().flatten().tolist()[:1]:
            rank, index = divmod(place, len(gradients[0]))
            name = next(s.name for s in self.by_worker[0].space.layout.specs if s.index == index)
            raise RuntimeError(
                f"step {self._steps}: worker {rank} has another mean of {name} than worker 0: replicas would diverge"
            )

    def carry_momentum(self, optimizers: Sequence[Optimizer], params: Sequence[Tensor]) -> None:
        index = {id(param): place for place, param in enumerate(params)}
        first = self.by_worker[0]

        def carried(param: Tensor) -> bool:
            return first.record is not None and index[id(param)] in first.record.selected_from

        self._switches, _, _ = fit_to_optimizers(self.by_worker, self._settings, optimizers, params, carried)

    def figures(self) -> TensorFigures:
        """What the latest step did to every tensor, summed over workers."""
        records = [engine.record for engine in self.by_worker]
        known = [window_figures(record) for record in records if record is not None]
        return TensorFigures(known[0].names, torch.stack([each.sums for each in known]).sum(0))

    def close(self) -> None:
        self._pool.shutdown()
        for switch in self._switches:
            switch.close()
