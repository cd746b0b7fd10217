"""Environment variables with which nothing runs beside the backward pass of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Of the backward pass, selection, waiting for exchanges, decoding, and NCCL.
_STREAMS = 5


def _true(value: str) -> bool:
    return value.strip().lower() in ("1", "y", "yes", "t", "true")


def _few(value: str) -> bool:
    return value.strip().isdigit() and int(value) < _STREAMS


def _detail(value: str) -> bool:
    return value.strip().upper() == "DETAIL"


# By name: which values hinder, and how.
_HINDRANCES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (_few, f"the {_STREAMS} streams of an exchange wait for each other"),
    "CUDA_LAUNCH_BLOCKING": (_true, "the host waits for every kernel"),
    "TORCH_NCCL_BLOCKING_WAIT": (_true, "the host waits for every exchange"),
    "NCCL_BLOCKING_WAIT": (_true, "the host waits for every exchange"),
    "TORCH_DISTRIBUTED_DEBUG": (_detail, "workers compare every exchange on the host before it begins"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_true, "the host waits where memory is freed"),
}


def hindrances(variables: Mapping[str, str]) -> str | None:
    """What takes the overlap of exchange and backward pass away, and how to get it back, as one line.

    Args:
        variables: The environment of the process.

    Returns:
        None if nothing does.
    """
    found = [
        f"{name}={variables[name]} ({effect})"
        for name, (hinders, effect) in _HINDRANCES.items()
        if name in variables and hinders(variables[name])
    ]
    if not found:
        return None
    return f"exchanges do not overlap with the backward pass, because of {', '.join(found)}: unset what is not needed"
