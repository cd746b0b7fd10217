"""Messages that were damaged in one way each; `test_message_properties.py` has any damage to any format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.virtual.transport import local_transports
from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import SpanSpec
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.elias_fano import EliasFanoCodec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.base import Selection
from tests.cluster import Cluster, settings
from tests.sparsify.oracle import KERNELS, kernels

EDGES = (0, 700, 701, 3000)
CAPACITY = 60
GUARD = 4096


def codec_of(wire: str) -> Codec:
    return resolve_codec(wire, EDGES[-1], CAPACITY, torch.float32, EDGES)


def intact(codec: Codec, generator: torch.Generator, count: int = 50) -> Tensor:
    indices = torch.randperm(EDGES[-1], generator=generator)[:count].sort().values
    message = torch.zeros(codec.nbytes, dtype=torch.uint8)
    codec.encode(Selection(indices, torch.randn(count, generator=generator), count), message)
    return message


def outcome(codec: Codec, message: Tensor, compiled: bool) -> str:
    """What becomes of a message that is received: "read", or what is said of it. Nothing else is written to."""
    (transport,) = local_transports(1)
    exchange = SparseAllGather(SpanSpec(EDGES[-1], CAPACITY, EDGES, ()), transport, torch.device("cpu"), codec)
    exchange.start().wait()
    exchange._received[exchange._selection] = message
    room = torch.full((EDGES[-1] + 2 * GUARD,), 7.0)
    span = room[GUARD:-GUARD]
    gradients = [span[start:stop] for start, stop in zip(EDGES[:-1], EDGES[1:], strict=True)]
    with kernels(compiled):
        try:
            if exchange.decode_into(gradients) is None:
                span.copy_(exchange.decode(torch.zeros(EDGES[-1])))
            said = "read"
        except ValueError as error:
            said = str(error)
    assert (room[:GUARD] == 7).all()
    assert (room[-GUARD:] == 7).all()
    return said


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("wire", ["bitmap-fp16", "bitmap-q4"])
def test_a_bitmap_with_too_many_bits_is_refused(wire: str, compiled: bool) -> None:
    codec = codec_of(wire)
    message = torch.full((codec.nbytes,), 255, dtype=torch.uint8)
    assert outcome(codec, message, compiled) == "a message with 3000 entries has room for 60: it is damaged"
    message = intact(codec, torch.Generator().manual_seed(0), CAPACITY)
    assert outcome(codec, message, compiled) == "read"
    clear = next(bit for bit in range(64) if not int(message[bit >> 3]) >> (bit & 7) & 1)
    message[clear >> 3] |= 1 << (clear & 7)  # one more than there is room for
    assert "61 entries has room for 60" in outcome(codec, message, compiled)


@pytest.mark.parametrize("compiled", KERNELS)
def test_a_bitmap_that_is_read_in_pieces_is_refused_where_it_has_no_room(compiled: bool) -> None:
    codec = codec_of("bitmap-fp16")
    message = torch.full((codec.nbytes,), 255, dtype=torch.uint8)
    with kernels(compiled):
        read = codec.reader(message)
        assert len(read(0, 40)[0]) == 40
        with pytest.raises(ValueError, match="room for 60: it is damaged"):
            read(40, 80)
        with pytest.raises(ValueError, match="room for 60: it is damaged"):
            codec.reader(message)(2000, 2008)


def test_the_drain_names_the_buffer_of_a_damaged_message() -> None:
    cluster = Cluster(2, lambda: settings(collective="allgather", wire="bitmap-fp32", fusion="single"))
    try:
        cluster.step(cluster.random_grads(0))
        cluster.step(cluster.random_grads(1))
        gathered = cluster.transports[0].all_gather

        def damaging(output: Tensor, tensor: Tensor) -> object:
            return gathered(output, torch.full_like(tensor, 255))

        cluster.transports[0].all_gather = damaging  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"buffer with .*t9.* failed in step 2: a message with .* it is damaged"):
            cluster.step(cluster.random_grads(2))
    finally:
        cluster.close()


def test_entries_behind_the_last_tensor_are_refused() -> None:
    codec = resolve_codec("eliasfano-fp32", 300, 40, torch.float32, (0, 7, 300))
    assert isinstance(codec, EliasFanoCodec)
    message = torch.zeros(codec.nbytes, dtype=torch.uint8)
    codec.encode(Selection(torch.arange(0, 280, 7), torch.ones(40), 40), message)
    start, stop = np.cumsum((0, *codec.field_bytes))[1:3]
    buckets = int(codec._buckets[-1])
    high = np.zeros(8 * (stop - start), np.uint8)
    high[buckets : buckets + 40] = 1  # as many entries as there are, all of them too far
    message[start:stop] = torch.from_numpy(np.packbits(high, bitorder="little"))
    with native.unused(), pytest.raises(ValueError, match="has entries behind its regions: it is damaged"):
        codec.reader(message)(0, 300)
