"""Ranges in the traces of ``torch.profiler``, as ``Trainer(profiler="pytorch")`` makes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch.profiler import record_function

from lightning_safusion.fusion.buffer import FusionBuffer
from lightning_safusion.fusion.generator import Generator

_SHOWN_TENSORS = 8


def profiler_range(
    part: Literal["select", "exchange", "decode"], generator: Generator, buffer: FusionBuffer
) -> AbstractContextManager[object]:
    """A range ``SAFusion::<part>`` around the work for one buffer; nothing while no profiler is active.

    Args:
        part: What is done: selection with packing, the launch of the collective, or decoding.
        generator: Knows the tensors' names, which are the range's argument (shown with ``record_shapes=True``).
        buffer: The buffer.
    """
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    names = generator.layout.names(buffer.places)
    more = f" and {len(names) - _SHOWN_TENSORS} more" if len(names) > _SHOWN_TENSORS else ""
    return record_function(f"SAFusion::{part}", ", ".join(names[:_SHOWN_TENSORS]) + more)
