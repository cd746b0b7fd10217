"""The adapter between torch's DistributedDataParallel and the engine: one Python communication hook."""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_safusion.comm.collectives.allreduce import coo_means
from lightning_safusion.comm.transport.interface import during
from lightning_safusion.fusion.engine import Engine

# DDP's `bucket_cap_mb` with which every parameter has a bucket, and hence a call of the hook, of its own: half a byte,
# which DDP rounds down to 0 bytes. torch 2.11 refuses a plain 0.
OWN_BUCKETS_MB = 2.0**-21

_HELD = (
    " DDP holds them back, since another parameter of their bucket has no gradient: one that was frozen after DDP had "
    "wrapped the model, or that no optimizer has."
)


class Relay:
    """DDP's communication hook, of which there can be one for ever: it passes buckets on, or does what DDP does.

    Attributes:
        target: Another hook, which may come and go between two backward passes; None: an all-reduce in the group.
        taken: Somebody sets the target.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.target: Callable[[object, GradBucket], Future[Tensor]] | None = None
        self.taken = False
        self._group: Any = group  # torch declares a group, and takes None

    def run(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook."""
        return allreduce_hook(self._group, bucket) if self.target is None else self.target(state, bucket)

    def __reduce__(self) -> tuple[type["Relay"], tuple[()]]:
        return Relay, ()  # DDP copies and pickles models in the default group alone; a copy is of no exchange


class GradientHook:
    """What a hook that pushes gradients to the engine knows of their parameters.

    Args:
        engine: Runs the windows.
        params: Those that are exchanged, in the order of the engine's registration indices.
        expected: Gradients of no tensor of the layout that every window averages.
    """

    def __init__(self, engine: Engine, params: Iterable[Tensor], expected: int) -> None:
        self.engine = engine
        self._expected = expected
        self._beside: list[Tensor] = []  # those that were submitted in this window
        self._index = {id(param): index for index, param in enumerate(params)}
        self._handles: list[RemovableHandle] = []
        self._watches: list[RemovableHandle] = []  # of optimizers

    def check_complete(self, synchronised: bool = True) -> None:
        """Checks that the backward pass that has just ended left no gradients unsynchronised.

        ``synchronised``: the pass was to exchange gradients (not one inside ``no_sync``).

        Raises:
            RuntimeError: With the names of the parameters that got no gradient.
        """
        raise NotImplementedError

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Records in the engine when these optimizers step; those of torch, others have no hook for that."""
        self._unwatch()
        watched = [self._watch(each) for each in optimizers if hasattr(each, "register_step_post_hook")]
        self.engine.steps.watch(list(chain(*watched)))

    def _watch(self, optimizer: Optimizer) -> list[int]:
        """Returns the registration indices of its parameters."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        indices, engine = [self._index[id(param)] for param in params if id(param) in self._index], self.engine

        def stepped(*_: object) -> None:
            # a fused optimizer is called in a step that the loss scaler skips, too
            overflowed = getattr(optimizer, "found_inf", None)
            if overflowed is None or not engine.undecided or not float(overflowed):
                engine.steps.stepped(indices)

        self._watches.append(optimizer.register_step_post_hook(stepped))
        return indices

    def _unwatch(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._watches.clear()

    def selected_from(self, param: Tensor) -> bool:
        """Whether the latest gradient of a parameter is a mean of selected elements, not of dense gradients."""
        record = self.engine.record
        return record is not None and self._index.get(id(param), -1) in record.selected_from

    def close(self) -> None:
        """Removes every hook and forgets an open window."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unwatch()
        self.reset()

    def reset(self) -> None:
        """Forgets an open window."""
        self._beside = []
        self.engine.reset()

    def _drain(self) -> None:
        self.engine.drain()
        beside, self._beside = self._beside, []
        if beside:
            self.engine.ending.average(beside)

    def _refuse(self, missing: Sequence[str], advice: str = "") -> NoReturn:
        self.reset()
        raise RuntimeError(
            f"{len(missing)} parameters got no gradient in this backward pass: {', '.join(missing[:20])}. The "
            f"gradients of this step are not synchronised.{advice}"
        )


class DDPHook(GradientHook):
    """Pushes the gradients of DDP's buckets to the engine, and drains it before DDP finalizes its backward pass.

    Use: ``hook = DDPHook(engine, params, static_graph=...)``, then ``ddp.register_comm_hook(None, hook.run)``. It holds
    no reference to DDP or to the parameters: DDP's C++ reducer holds the hook, and such a cycle would never be
    collected. With ``torch.compile``, set ``ddp.bucket_bytes_cap`` to DDP's usual 25 MiB after
    ``bucket_cap_mb=OWN_BUCKETS_MB``: graphs are split by it.

    Args:
        engine, params: See :class:`GradientHook`.
        sparse: Names and parameters whose gradients are sparse tensors; they are not in the engine's layout.
        static_graph: DDP was built with ``static_graph=True``.
        untrained: Names and parameters that no optimizer has; their gradients are not in the engine's layout.
        averages: Average the gradients of these uncompressed; else they become 0 on all ranks, and nothing is sent.
    """

    def __init__(
        self,
        engine: Engine,
        params: Iterable[Tensor],
        sparse: Iterable[tuple[str, Tensor]] = (),
        static_graph: bool = False,
        untrained: Iterable[tuple[str, Tensor]] = (),
        averages: bool = False,
    ) -> None:
        params = list(params)
        self._untrained = {id(param): name for name, param in untrained}
        super().__init__(engine, params, len(self._untrained) if averages else 0)
        self._sparse_names = {id(param): name for name, param in sparse}
        self._sparse: dict[str, tuple[Tensor, Future[Tensor]]] = {}  # submitted in this window
        self._ending = False  # all is there: what no optimizer has may still come
        # Of buckets with one parameter, by their number: to make a future costs more than the rest of the hook.
        self._seen: dict[int, tuple[Tensor, Future[Tensor], int]] = {}
        self._device_type = engine.space.device.type
        self._rebuilt = False  # DDP makes other buckets after its first window
        # In the first static-graph iteration DDP calls all hooks, then finalizes, in one go from the engine's end: a
        # callback queued there would come too late.
        self._drain_in_hook = static_graph
        self._fresh = fresh = [False] * len(self._index)
        places = self._index

        def mark(param: Tensor) -> None:  # parameters must not hold the engine, which has the optimizers that hold them
            fresh[places[id(param)]] = True

        for param in params:
            self._handles.append(param.register_post_accumulate_grad_hook(mark))

    # Manual optimization in a compiled training_step runs the backward pass there: Dynamo would trace the hook.
    @torch.compiler.disable
    def run(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook.

        The future is complete at once and holds the bucket itself: DDP reads it after the backward pass, when
        :meth:`_finish` has written the mean into it. (DDP would misread a tensor of any other storage offset.)
        """
        buffer = bucket.buffer()
        seen = self._seen.get(bucket.index())
        if torch.is_autocast_enabled(self._device_type):
            # manual_backward runs inside the autocast of training_step
            with torch.autocast(self._device_type, enabled=False):
                future, complete = self._take(bucket, buffer)
        elif seen is not None and seen[0] is buffer:  # DDP has made no other buckets since
            _, future, index = seen
            complete = self.engine.push(index, buffer, self._fresh[index])
        else:
            future, complete = self._take(bucket, buffer)
        if complete or ((self._sparse or self._beside) and self.engine.complete):
            complete = len(self._sparse) == len(self._sparse_names) and len(self._beside) == self._expected
        if complete and not self._ending:
            self._ending = True
            if self._drain_in_hook:
                self._finish()
            else:
                # Never wait inside the hook: another rank may need this thread's next collective first (SyncBatchNorm)
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return future

    def _take(self, bucket: GradBucket, buffer: Tensor) -> tuple[Future[Tensor], bool]:
        """The bucket's future, and whether the window is complete."""
        params = bucket.parameters()
        future: Future[Tensor] = Future()
        if buffer.is_sparse:
            # its mean is another tensor, which does not exist yet
            self._sparse[self._sparse_names[id(params[0])]] = buffer, future
            return future, False
        start, complete = 0, False
        for param in params:
            stop = start + param.numel() * (2 if param.is_complex() else 1)
            grad = buffer[start:stop]
            if (index := self._index.get(id(param))) is not None:
                complete = self.engine.push(index, grad, self._fresh[index])
            elif id(param) not in self._untrained:
                if param.requires_grad:  # else DDP passes it on with others that are unused
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} was frozen at set-up, and is not now: call bind of "
                        "what attach has returned, on all workers, after a change"
                    )
            elif self._expected:
                self._beside.append(grad)
            else:
                grad.zero_()
            start = stop
        future.set_result(buffer)
        if self._rebuilt and len(params) == 1 and id(params[0]) in self._index:
            self._seen[bucket.index()] = buffer, future, self._index[id(params[0])]
        return future, complete

    @torch.compiler.disable
    def _finish(self) -> None:
        self._drain_in_hook, self._rebuilt, self._ending = False, True, False
        self._fresh[:] = [False] * len(self._fresh)
        waiting = during(f"the exchange of gradients in step {self.engine.windows}")
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False), waiting:
            self._drain()
            if self._sparse:
                # in the order in which the buckets came, which is the same on all ranks
                submitted, self._sparse = list(self._sparse.values()), {}
                means = coo_means(self.engine.transport, [grad for grad, _ in submitted])
                for (_, future), mean in zip(submitted, means, strict=True):
                    future.set_result(mean)

    def check_complete(self, synchronised: bool = True) -> None:
        if not (any(self._fresh) or self._sparse):
            return  # drained: almost always
        layout = self.engine.space.layout
        stale = [spec.name for spec in layout.specs if not self._fresh[spec.index]]
        missing = self.engine.missing()
        if not missing and synchronised:
            # DDP's first bucket holds everything and was never full: the hook has not run at all
            missing = stale or list(self._untrained.values())
        # DDP passes on no bucket after the first that is missing: name those that have no gradient, if any
        held = "" if stale or not missing else _HELD
        missing = [name for name in missing if name in set(stale)] or missing
        if self._sparse or self.engine.complete:
            missing += [name for name in self._sparse_names.values() if name not in self._sparse]
        if missing:
            self._refuse(
                missing,
                held + " If this is intended, pass find_unused_parameters=True to the strategy (by name: "
                "'safusion_find_unused_parameters_true'), or to the DistributedDataParallel that was attached.",
            )

    def __deepcopy__(self, memo: object) -> "DDPHook":
        return self  # a copy of the wrapped model has the hook as DDP's reducer has it: it is not the model's

    def reset(self) -> None:
        self._sparse, self._seen, self._ending = {}, {}, False
        super().reset()
