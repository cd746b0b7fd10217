"""A link of known rate between workers of one machine: the kernel paces their connections (Linux, no privileges)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from threading import Thread
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

_SO_MAX_PACING_RATE = 47  # of Linux's <asm-generic/socket.h>; socket(7)
_BYTES_SENT = 200  # where struct tcp_info has tcpi_bytes_sent, of 8 bytes (Linux 4.19)
_PROBED_SECONDS = 0.3
_CHUNK, _MOST = 1 << 16, 1 << 26  # bytes that are received at once, and that are sent at most
_UNPACED = 10  # segments that a connection begins with (tcp_update_skb_after_send of net/ipv4/tcp_output.c)


class Paced(Callback):
    """Limits what each connection of this process sends, those between workers among them.

    A worker has one exchange under way at a time, so that two workers exchange as over a link of this rate, in both
    directions at once. The rate is in bytes per second; those of headers do not count.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._pace_all()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pace_all()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._pace_all()  # connections may have been opened since

    def _pace_all(self) -> None:
        for each in _connections():
            _pace(each, self._rate)


def sent_bytes() -> int:
    """What all connections of this process have sent so far, headers not counted; 0 where the kernel does not say."""
    infos = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8) for each in _connections()]
    return sum(int.from_bytes(info[_BYTES_SENT:], sys.byteorder) for info in infos)


def _pace(connection: socket.socket, rate: float) -> None:
    # eight bytes: the rates of Python's integer options end at 17 Gbit/s
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, round(rate).to_bytes(8, sys.byteorder))


def _connections() -> Iterator[socket.socket]:
    """A copy of each TCP socket that this process has open, closed when the next one is asked for."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            each = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:  # closed by now, as that of the listing is
            continue
        with each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                yield each


def paced_rate(rate: float) -> float:
    """Bytes per second that a connection of this machine takes if it is paced to a rate.

    A kernel may lack pacing (gVisor's does). Takes a third of a second where it has it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        _pace(sender, rate)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receiver, _ = server.accept()
        for _ in range(_UNPACED):
            sender.sendall(b"0")
            receiver.recv(1)
        total = min(max(_CHUNK, round(rate * _PROBED_SECONDS)), _MOST)
        thread = Thread(target=sender.sendall, args=(bytes(total),), daemon=True)
        begin = perf_counter()
        thread.start()
        with receiver:
            left = total
            while left and (received := receiver.recv(_CHUNK)):
                left -= len(received)
        thread.join()
        return total / (perf_counter() - begin)
