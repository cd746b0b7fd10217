"""Several machines on one: a network namespace each, joined by links of a given rate. Needs root, ``ip`` and ``tc``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.processes import which


@dataclass(frozen=True)
class Namespace:
    """A machine of its own as far as the network is concerned; its device is ``eth0``.

    Args:
        name: Of the network namespace.
        address: IPv4, reachable from the other namespaces and from nowhere else.
        device: The host's end of its link.
    """

    name: str
    address: str
    device: str

    def command(self, command: Sequence[str | Path]) -> list[str | Path]:
        """The command line that runs ``command`` inside."""
        return [which("ip") or "ip", "netns", "exec", self.name, *command]


@contextmanager
def linked_namespaces(count: int, rate: str = "1gbit") -> Iterator[list[Namespace]]:
    """Makes ``count`` namespaces that reach each other over a bridge, and removes them again.

    Both ends of every link carry at most ``rate`` (token bucket). The bridge has no address: nothing of the host's own
    network is touched.
    """
    # names of network devices have at most 15 characters
    prefix = f"saf{os.getpid()}"
    bridge = f"{prefix}b"
    machines = [Namespace(f"{prefix}n{i}", f"10.71.0.{i + 1}", f"{prefix}v{i}") for i in range(count)]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for machine in machines:
            _connect(machine, bridge, rate)
        yield machines
    finally:
        for machine in machines:
            _run("ip", "netns", "delete", machine.name, check=False)  # and with it both ends of the link
        _run("ip", "link", "delete", bridge, check=False)


def shape(machine: Namespace, rate: str) -> None:
    """Lets both ends of a machine's link carry ``rate`` from now on."""
    shaped = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
    _run("tc", "qdisc", "replace", "dev", machine.device, *shaped)
    _run("tc", "-netns", machine.name, "qdisc", "replace", "dev", "eth0", *shaped)


def _connect(machine: Namespace, bridge: str, rate: str) -> None:
    inside, device = ("ip", "-netns", machine.name), machine.device
    _run("ip", "netns", "add", machine.name)
    # Linux 6.18 refuses the name of a device of the host for a peer in another namespace: renamed there
    _run("ip", "link", "add", device, "type", "veth", "peer", "name", f"{device}p", "netns", machine.name)
    _run(*inside, "link", "set", f"{device}p", "name", "eth0")
    _run("ip", "link", "set", device, "master", bridge, "up")
    _run(*inside, "address", "add", f"{machine.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    _run(*inside, "link", "set", "lo", "up")
    shape(machine, rate)


def _run(program: str, *arguments: str, check: bool = True) -> None:
    done = subprocess.run([which(program) or program, *arguments], capture_output=True, text=True, timeout=20)
    if check and done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
