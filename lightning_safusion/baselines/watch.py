"""Tells when the parameters of a model are used, whoever uses them."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Used = Callable[[nn.Parameter], None]


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """The dict in which a module keeps its own parameters; tells of every one that is taken out.

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
        self._all()
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # the same
        self._all()
        return super().items()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def _all(self) -> None:
        for param in super().values():
            if param is not None:
                self._used(param)


class _BeforeForward:
    """A forward pre-hook, for modules that keep references to their own parameters; a copy of it does nothing."""

    def __init__(self, used: Used | None = None) -> None:
        self._used = used

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._used is not None:
            module._parameters.values()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


class ParameterWatch:
    """Calls ``used(parameter)`` before anybody gets hold of a parameter through the module that has it.

    Not seen are references that somebody has kept: a list of parameters made once, the groups of an optimizer. Nor is
    compiled code, which reads what it was compiled for.

    Args:
        module: The model.
        used: Called very often: must return fast where nothing is to do.
    """

    def __init__(self, module: nn.Module, used: Used) -> None:
        self._watched: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        for owner in module.modules():
            if owner._parameters:
                owner._parameters = _WatchedParameters(owner._parameters, used)
                self._watched.append(owner)
                self._handles.append(owner.register_forward_pre_hook(_BeforeForward(used)))

    def close(self) -> None:
        """Puts everything back."""
        for owner in self._watched:
            if isinstance(owner._parameters, _WatchedParameters):
                owner._parameters = owner._parameters.copy()
        for handle in self._handles:
            handle.remove()
        self._watched.clear()
        self._handles.clear()
