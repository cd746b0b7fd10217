"""Which uses of a model's parameters can be seen, and a call before each of them."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Used = Callable[[nn.Parameter], None]


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """The dict in which a module keeps its own parameters; calls ``used`` for every one that is taken out.

    ``module.weight``, ``parameters()``, ``state_dict()`` and ``to()`` all go through it. Copies of it, and what pickle
    writes, are plain dicts. (DeepSpeed gathers ZeRO-3 parameters in the same place.)
    """

    def __init__(self, params: dict[str, nn.Parameter | None], used: Used) -> None:
        super().__init__(params)
        self._used = used

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._used(param)
        return param

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]  # typeshed returns a final class
        self.use_all()
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # the same
        self.use_all()
        return super().items()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def use_all(self) -> None:
        for param in super().values():
            if param is not None:
                self._used(param)


def _before_forward(module: nn.Module, args: Any) -> None:
    """A forward pre-hook, for modules that keep references to their own parameters; copies of a model have it too."""
    if isinstance(module._parameters, _WatchedParameters):
        module._parameters.use_all()


class ParameterWatch:
    """Calls ``used(parameter)`` before a parameter is taken from the module that has it.

    Not seen are uses through references kept elsewhere: a list of parameters made once, the groups of an optimizer. Nor
    is compiled code, which reads what it was compiled for (:func:`runs_compiled`).

    Args:
        module: The model.
        used: Called very often: must return fast where nothing is to do.
    """

    def __init__(self, module: nn.Module, used: Used) -> None:
        self._watched = [owner for owner in module.modules() if owner._parameters]
        self._handles: list[RemovableHandle] = []
        for owner in self._watched:
            owner._parameters = _WatchedParameters(owner._parameters, used)
            self._handles.append(owner.register_forward_pre_hook(_before_forward))

    def close(self) -> None:
        """Puts everything back."""
        for owner in self._watched:
            if isinstance(owner._parameters, _WatchedParameters):
                owner._parameters = owner._parameters.copy()
        for handle in self._handles:
            handle.remove()


def runs_compiled(module: nn.Module) -> bool:
    """Whether a part of a model, or a function that it keeps, has been compiled: uses of parameters cannot be seen."""
    parts = list(module.modules())
    kinds = (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)
    if any(isinstance(part, kinds) or part._compiled_call_impl is not None for part in parts):
        return True
    classes = {cls for part in parts for cls in type(part).__mro__}
    functions = [kept for it in (*parts, *classes) for kept in vars(it).values() if isinstance(kept, FunctionType)]
    return any("_torchdynamo_orig_callable" in vars(function) for function in functions)
