"""Where the kernels cannot be compiled, nothing raises: the operations of torch take their place."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lightning_safusion.kernels import cuda
from lightning_safusion.kernels.cuda import buffer
from lightning_safusion.kernels.cuda.packer import Workspace

DEVICE = torch.device("cuda", 7)  # what is known of a device is kept


def refuse(device: torch.device) -> None:
    raise RuntimeError("ptxas fatal: Value 'sm_100' is not defined for option 'gpu-name'")


def test_a_compiler_that_does_not_know_a_device_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(buffer, "probe", refuse)
    with pytest.warns(UserWarning, match="cannot run here .*sm_100.*PyTorch operations"):
        assert not cuda.serves_buffers(DEVICE)


@pytest.mark.parametrize("number", [1, 3, 4, 5])
def test_pieces_of_the_workspace_begin_at_16_bytes(number: int) -> None:
    """Or kernels would be compiled again, with twice the instructions, for some numbers of tensors."""
    workspace = Workspace(torch.device("cpu"))
    workspace.take([64], 1)[0].fill_(7)
    pieces = workspace.take([number, 2 * number, 9, number], 2)
    assert [len(piece) for piece in pieces] == [number, 2 * number, 9, number]
    assert all(piece.data_ptr() % 16 == 0 for piece in pieces)
    assert not torch.cat(pieces[:2]).any()
    workspace.release()
    again = workspace.take([5, number], 1)
    assert [len(piece) for piece in again] == [5, number]
    assert not again[0].any()
