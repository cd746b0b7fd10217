"""How a message crosses the network: wire formats, transports and costs."""

from lightning_safusion.comm.cost import LINKS, LinearCost, Link, fit_linear
from lightning_safusion.comm.transport.interface import ReduceOp, Transport, Work
from lightning_safusion.comm.transport.torch_backend import SoloTransport, TorchTransport, default_transport
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import available_wires, resolve_codec, value_format

__all__ = [
    "LINKS",
    "Codec",
    "LinearCost",
    "Link",
    "ReduceOp",
    "SoloTransport",
    "TorchTransport",
    "Transport",
    "Work",
    "available_wires",
    "default_transport",
    "fit_linear",
    "resolve_codec",
    "value_format",
]
