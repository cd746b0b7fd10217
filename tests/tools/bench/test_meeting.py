"""The store of a benchmark's processes."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from lightning_safusion.tools.bench.meeting import _store


def test_the_store_of_one_machine_listens_there_alone() -> None:
    store = _store("127.0.0.1", timedelta(seconds=5))
    store.set("key", "value")
    assert store.get("key") == b"value"
    # every address of 127.0.0.0/8 is this machine's: one that listens on all of them answers here
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 2)
