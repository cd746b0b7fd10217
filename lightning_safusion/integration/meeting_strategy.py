"""What the strategies of this package do where all workers meet: process groups, and Lightning's own collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_safusion.comm.transport.interface import during
from lightning_safusion.comm.transport.rounds import apart
from lightning_safusion.comm.transport.torch_backend import end_groups_at_exit, hurry_at_exit


class MeetingStrategy(ParallelStrategy):
    """Before a strategy of Lightning: where a worker is lost in one of its collectives, the error says in which."""

    _timeout: timedelta | None

    @property
    def _place(self) -> str:
        """Where training is, for messages."""
        module = self.lightning_module
        return f"step {module.global_step}, epoch {module.current_epoch}" if module is not None else "set-up"

    @contextmanager
    def _making_groups(self) -> Iterator[None]:
        """While Lightning makes the default process group, unless it was given."""
        given = dist.is_available() and dist.is_initialized()
        with apart(self._timeout):
            yield
        if not given:  # it is ours to end
            end_groups_at_exit()

    def _meet(self, what: str) -> None:
        """A barrier or a broadcast follows."""

    @override
    def barrier(self, name: str | None = None) -> None:
        with during(f"the barrier{f' {name!r}' if name else ''} of Lightning in {self._place}"):
            self._meet(f"barrier {name}")
            super().barrier(name)  # type: ignore[safe-super]  # that of Lightning's strategy

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        with during(f"a broadcast of Lightning in {self._place}"):
            self._meet("broadcast")
            return super().broadcast(obj, src)  # type: ignore[safe-super]  # the same

    @override
    def reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with during(f"a reduction of Lightning in {self._place}"):
            return super().reduce(tensor, *args, **kwargs)  # type: ignore[safe-super]  # the same

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with during(f"an all-gather of Lightning in {self._place}"):
            return super().all_gather(tensor, *args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        hurry_at_exit()
        super().on_exception(exception)
