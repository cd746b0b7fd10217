"""Messages with checksums: damage is found before anything is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.comm.transport.interface import DamagedMessageError, Work
from lightning_safusion.comm.transport.sealed import SEAL_BYTES, SealedTransport
from lightning_safusion.kernels import cpu as native

#: In an all-to-all of two ranks what comes in, and what goes out.
SIZES = (([0, 0], [0, 8]), ([8, 0], [0, 0]))
Change = Callable[[Tensor], None]


class Noisy(LocalTransport):
    """Changes what it carries.

    Args:
        transport: Of a virtual worker; its place is taken.
        change: Called with what is sent, as bytes.
    """

    def __init__(self, transport: LocalTransport, change: Change) -> None:
        super().__init__(transport.rank, transport._exchange)
        self.change = change

    def _launch(self, call: object, value: object, output: Tensor, sent: float, received: float) -> Work:
        if isinstance(value, Tensor):
            value = value.clone()
            self.change(value)
        elif isinstance(value, tuple):
            for piece in value[0]:
                self.change(piece)
        return super()._launch(call, value, output, sent, received)  # type: ignore[arg-type]  # as it came


def flipped(bit: int) -> Change:
    def change(message: Tensor) -> None:
        if len(message):
            message[bit >> 3] ^= 1 << (bit & 7)

    return change


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "permute", "broadcast"])
def test_every_bit_counts_in_every_operation(name: str) -> None:
    first, second = local_transports(2)
    noisy = Noisy(first, lambda message: None)
    sealed = SealedTransport(noisy), SealedTransport(second)
    message = torch.arange(1, 9, dtype=torch.uint8)

    def both() -> Tensor:
        """What the second rank gets of the first."""
        gathered = torch.zeros(2, 16, dtype=torch.uint8)
        output = gathered[1, :8]
        calls: dict[str, Callable[[int, SealedTransport], Work]] = {
            "all_gather": lambda rank, own: own.all_gather(gathered[rank], message),
            "all_to_all": lambda rank, own: own.all_to_all(output[: 8 * rank], message[8 * rank :], *SIZES[rank]),
            "permute": lambda rank, own: own.permute(output, message, [(0, 1)]),
            "broadcast": lambda rank, own: own.broadcast(output if rank else message),
        }
        works = [calls[name](rank, own) for rank, own in enumerate(sealed)]
        for work in works:
            work.wait()
        return output

    assert torch.equal(both(), message)
    for bit in range(8 * (len(message) + SEAL_BYTES)):
        noisy.change = flipped(bit)
        assert not both().any()
        # an all-gather brings its own to the first one too
        assert [transport.take_damage() for transport in sealed] == [[0] if name == "all_gather" else [], [0]]


@given(
    size=st.integers(1, 20_000),
    place=st.floats(0, 1, exclude_max=True),
    burst=st.integers(1, 2**32 - 1),
    compiled=st.booleans(),
)
def test_up_to_32_neighbouring_bits_of_a_long_message_are_found(
    size: int, place: float, burst: int, compiled: bool
) -> None:
    def change(message: Tensor) -> None:
        bits = np.unpackbits(message.numpy(), bitorder="little")
        start = int(place * len(bits))
        run = np.unpackbits(np.array([burst | 1], "<u4").view(np.uint8), bitorder="little")[: len(bits) - start]
        bits[start : start + len(run)] ^= run
        message.copy_(torch.from_numpy(np.packbits(bits, bitorder="little")))

    sealed = SealedTransport(Noisy(local_transports(1)[0], change))
    message = torch.arange(size).to(torch.uint8)
    with native.unused():  # what is written by Python is read by C
        work = sealed.all_gather(message.clone(), message)
    if compiled:
        work.wait()
    else:
        with native.unused():
            work.wait()
    assert sealed.take_damage() == [0]


def test_the_message_stands_behind_its_checksum() -> None:
    seen: list[Tensor] = []
    sealed = SealedTransport(Noisy(local_transports(1)[0], lambda message: seen.append(message.clone())))
    message = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    sealed.all_gather(torch.zeros_like(message), message).wait()
    assert bytes(seen[0].tolist()) == (0xE3069283).to_bytes(4, "little") + b"123456789"


def test_damaged_lengths_are_an_error_at_once() -> None:
    sealed = SealedTransport(Noisy(local_transports(1)[0], flipped(40)))
    lengths = torch.tensor([3])
    with pytest.raises(DamagedMessageError, match="lengths of later messages that rank 0 has sent are damaged"):
        sealed.all_to_all(torch.zeros_like(lengths), lengths, [1], [1]).wait()


def test_a_part_of_the_ranks_is_named_as_in_the_job() -> None:
    whole = [SealedTransport(transport) for transport in local_transports(4)]
    parts = [transport.split([(0, 2), (1, 3)]) for transport in whole]
    parts[3]._transport.__class__ = Noisy  # type: ignore[attr-defined]  # a communicator that was made inside
    parts[3]._transport.change = flipped(50)  # type: ignore[attr-defined]
    message = torch.ones(8, dtype=torch.uint8)
    works = [parts[rank].all_gather(torch.zeros(16, dtype=torch.uint8), message) for rank in (1, 3)]
    for work in works:
        work.wait()
    assert whole[1].take_damage() == [3]
    assert whole[0].take_damage() == []
