"""The engine's state by parameter name: what outlives a job, an order of tensors and a number of workers.

Two parts: the *common* state, the same on all ranks, and the *local* state of each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.window import Notices


def common_state(engine: Engine) -> dict[str, Any]:
    """Counters, order of the tensors, plan, agreed costs, state of exchanges: plain values, the same on all ranks."""
    engine.settle()
    return {
        "windows": engine.windows,
        "first_windows": engine.first_windows.state_dict(),  # rank 0's
        "density": engine.space.quotas.density,
        "tensors": [spec.name for spec in engine.space.layout.specs],
        "order_known": engine.order_known,
        "planner": engine.planner.state_dict(),
        "exchanges": engine.space.exchange_state(),
        "shares": engine.space.shares.state_dict(engine.space.layout),
    }


def restore_common(engine: Engine, state: Mapping[str, Any], same_job: bool = True) -> None:
    """Restores what :func:`common_state` returned, and moves the memory to the restored order.

    Args:
        engine: A new one, or one that has trained since the state was saved.
        state: The same on all ranks.
        same_job: Settings and number of workers are the same, so that the plan and its costs hold.
    """
    space = engine.space
    engine.reset()
    engine.windows, engine.order_known = int(state["windows"]), False
    engine.planner.invalidate(order_changed=True)
    if "first_windows" in state:
        engine.first_windows.load_state_dict(state["first_windows"])
    else:  # an older checkpoint
        engine.first_windows.ignore_rate()
    places = {spec.name: place for place, spec in enumerate(space.layout.specs)}
    if sorted(places) != sorted(state["tensors"]):
        return
    engine.order_known = bool(state["order_known"])
    engine.adopt_order([places[name] for name in state["tensors"]])
    if "shares" in state:  # older checkpoints have none
        space.shares.load_state_dict(space.layout, state["shares"])
    if same_job:
        space.set_density(float(state["density"]))
        engine.planner.load_state_dict(state["planner"], space.shape)
        space.restore_exchanges(state.get("exchanges", ()))  # older checkpoints have none


def local_state(engine: Engine) -> dict[str, Any]:
    """This rank's part.

    Returns:
        ``memory``: by field (``"residual"``) and parameter name, float32 of the parameter's shape (views, not copies;
        complex parameters as [..., 2]); ``compressor``; ``unstepped``: names of the tensors whose last exchanged
        gradient no optimizer has used. Plain values and CPU tensors.
    """
    engine.settle()
    space = engine.space
    layout = space.layout
    names = {spec.index: spec.name for spec in layout.specs}
    fields = {field: flat.detach().cpu() for field, flat in space.memory.state_dict().items()}
    return {
        "memory": {field: _by_name(engine, flat) for field, flat in fields.items()},
        "compressor": _rekeyed(space.selector.sparsifier.state_dict(), names),
        "unstepped": [spec.name for spec in layout.specs if engine.steps.unstepped[spec.index]],
    }


def restore_unstepped(engine: Engine, names: Collection[str]) -> None:
    """Restores the ``unstepped`` part of :func:`local_state`; unknown names are left out."""
    for spec in engine.space.layout.specs:
        engine.steps.unstepped[spec.index] = spec.name in names


def restore_sparsifier(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restores the ``compressor`` part of :func:`local_state`.

    Raises:
        ValueError: If it is not the state of such a sparsifier.
    """
    indices = {spec.name: spec.index for spec in engine.space.layout.specs}
    try:
        engine.space.selector.sparsifier.load_state_dict(_rekeyed(state, indices))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the state of {engine.space.selector.sparsifier.name!r}: {error!r}") from error


class MemoryBuilder:
    """Memory state under construction for an engine's layout, from one rank's part or as a mean of several.

    ``fields``: flat float32 [D] by field, on the device of the gradients; tensors that no part has are zero.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        memory = engine.space.memory
        self.fields = {field: torch.zeros_like(flat) for field, flat in memory.state_dict().items()}
        self._views = {field: _by_name(engine, flat) for field, flat in self.fields.items()}

    def add(self, memory: Mapping[str, Mapping[str, Tensor]], weight: float = 1.0) -> None:
        """Adds ``weight`` times the ``memory`` part of :func:`local_state`, as far as names and shapes match."""
        for field, views in self._views.items():
            saved = memory.get(field, {})
            for name, view in views.items():
                if name in saved and saved[name].shape == view.shape:
                    view.add_(saved[name].to(view.device), alpha=weight)

    def mismatches(self, memory: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Names of tensors that :meth:`add` cannot match, in the engine or in ``memory``, by the fields of both."""
        names = []
        for field in self._views.keys() & memory.keys():
            ours, theirs = self._views[field], memory[field]
            common = {name for name in ours if name in theirs and ours[name].shape == theirs[name].shape}
            names += [name for name in {**ours, **theirs} if name not in common]
        return list(dict.fromkeys(names))

    def drop(self, names: Iterable[str]) -> None:
        """Sets these tensors to zero in every field."""
        for name in names:
            for views in self._views.values():
                if name in views:
                    views[name].zero_()

    def restore(self) -> None:
        """Replaces the state of the memory."""
        self._engine.space.memory.load_state_dict(self.fields)


def carried(engine: Engine, replaced: Collection[str] = ()) -> dict[str, Any]:
    """State for an engine of other tensors of the same model, without the residual of ``replaced`` ones.

    Copies, since the memory is used again.
    """
    state = local_state(engine)
    memory = {
        field: {name: piece.clone() for name, piece in views.items() if name not in replaced}
        for field, views in state["memory"].items()
    }
    counted = {"windows": engine.windows, "epoch": engine.epoch, "first_windows": engine.first_windows.state_dict()}
    return {**state, "memory": memory, "counters": counted | vars(engine.notices)}


def restore_carried(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restores what :func:`carried` returned, by name; the order of the gradients is found anew."""
    builder = MemoryBuilder(engine)
    builder.add(state["memory"])
    builder.restore()
    restore_sparsifier(engine, state["compressor"])
    restore_unstepped(engine, state["unstepped"])
    counters = state["counters"]
    engine.windows, engine.epoch = counters["windows"], counters["epoch"]
    engine.first_windows.load_state_dict(counters["first_windows"])
    engine.notices = Notices(counters["own"], counters["heard"])


def _by_name(engine: Engine, flat: Tensor) -> dict[str, Tensor]:
    layout = engine.space.layout
    edges = layout.edges.tolist()
    return {spec.name: spec.logical(flat[edges[i] : edges[i + 1]]) for i, spec in enumerate(layout.specs)}


def _rekeyed(state: Mapping[str, Any], table: Mapping[Any, Hashable]) -> dict[str, Any]:
    """State of a sparsifier with the keys of its segments replaced: registration indices differ between runs."""
    if "keys" not in state:
        return dict(state)
    return {**state, "keys": [_rekey(key, table) for key in state["keys"]]}


def _rekey(key: Any, table: Mapping[Any, Hashable]) -> Any:
    if isinstance(key, tuple) and len(key) > 1:  # ("group", first tensor, elements): a fused segment
        return (key[0], table.get(key[1], key[1]), *key[2:])
    return table.get(key, key)
