"""What one steady window passes through stays small."""

from __future__ import annotations

import pytest

from lab.window import steady_window
from lightning_safusion.kernels import cpu as native


@pytest.mark.slow
@pytest.mark.skipif(not native.usable(), reason="the package was installed without a C compiler")
@pytest.mark.parametrize(("optimizer", "most"), [("sgd", 80), ("adamw", 84)])
def test_a_steady_window_passes_through_few_functions(optimizer: str, most: int) -> None:
    buffers = 3
    calls = steady_window(optimizer, buffers=buffers)
    # how often a host looks whether it waits in vain depends on the other worker
    calls.pop(("comm/transport/lockstep.py", "Lockstep.check"), None)
    assert sum(calls.values()) <= most * buffers, calls.most_common()
