"""Several machines on one: a network namespace each, joined by links of a given rate (Linux, root, ``ip``, ``tc``)."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from typing_extensions import override

from lightning_safusion.tools.team import Place

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# A bucket passes its burst at full speed after every pause: as little as tc needs for the rate, or small messages would
# cost nothing.
_BURST_SECONDS, _MIN_BURST = 1e-3, 16_000
_CLONE_NEWNET = 0x40000000
_uses = itertools.count()
_ports = itertools.count(29500)  # namespaces have all ports to themselves


@dataclass(frozen=True)
class Namespace:
    """A network namespace, whose ``eth0`` only the other namespaces reach.

    Args:
        name: Of the namespace.
        address: IPv4 address of ``eth0``.
        device: The host's end of its link.
    """

    name: str
    address: str
    device: str

    def enter(self) -> None:
        """Moves this thread, and the threads and processes that it starts from now on, into the namespace.

        Raises:
            OSError: If that is not possible.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")

    def shape(self, rate: str) -> None:
        """Limits both ends of the link to a rate."""
        burst = max(_MIN_BURST, round(bits_per_second(rate) / 8 * _BURST_SECONDS))
        shaped = ("root", "tbf", "rate", rate, "burst", str(burst), "latency", "100ms")
        _run("tc", "qdisc", "replace", "dev", self.device, *shaped)
        _run("tc", "-netns", self.name, "qdisc", "replace", "dev", "eth0", *shaped)

    def connect(self, bridge: str, rate: str) -> None:
        """Makes the namespace, and its link to a bridge."""
        inside = ("ip", "-netns", self.name)
        _run("ip", "netns", "add", self.name)
        # Linux 6.18 refuses the name of a device of the host for a peer in another namespace: renamed there
        _run("ip", "link", "add", self.device, "type", "veth", "peer", "name", f"{self.device}p", "netns", self.name)
        _run(*inside, "link", "set", f"{self.device}p", "name", "eth0")
        _run("ip", "link", "set", self.device, "master", bridge, "up")
        _run(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        self.shape(rate)


def why_no_links() -> str | None:
    """Why this process cannot make links of its own; None if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc") if _find_program(program) is None]
    return f"{' and '.join(missing)} not found (Debian: iproute2)" if missing else None


def bits_per_second(rate: str) -> float:
    """The rate of a link, as ``tc`` takes it: ``"100mbit"``, ``"2.5gbit"``, ``"500kbit"``.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"the rate of a link is written as in '100mbit' or '2.5gbit', got {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


@contextmanager
def linked_namespaces(count: int, rate: str = "1gbit") -> Iterator[list[Namespace]]:
    """Makes ``count`` namespaces that reach each other over a bridge, and removes them again.

    Both ends of every link carry at most ``rate`` (token bucket). The bridge has no address: nothing of the host's own
    network is touched. Call it in the main thread: it handles SIGTERM.

    Raises:
        ValueError: If ``rate`` is none.
        RuntimeError: If links cannot be made here, or ``ip`` or ``tc`` fails; says why.
    """
    bits_per_second(rate)
    reason = why_no_links()
    if reason is not None:
        raise RuntimeError(f"links of {rate} cannot be made: {reason}")
    # Names of network devices have at most 15 characters. The kernel removes devices some time after their namespace:
    # names are not used twice.
    prefix = f"sf{os.getpid()}{chr(ord('a') + next(_uses) % 26)}"
    bridge = f"{prefix}b"
    machines = [Namespace(f"{prefix}n{i}", f"10.71.0.{i + 1}", f"{prefix}v{i}") for i in range(count)]

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)  # so that namespaces are removed

    before = signal.signal(signal.SIGTERM, leave)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for machine in machines:
            machine.connect(bridge, rate)
        yield machines
    finally:
        for machine in machines:
            _run("ip", "netns", "delete", machine.name, check=False)  # and with it both ends of the link
        _run("ip", "link", "delete", bridge, check=False)
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@dataclass(frozen=True)
class Machines(Place):
    """Workers in a network namespace each.

    Args:
        workers: How many.
        machines: One for each.
    """

    machines: tuple[Namespace, ...]

    @override
    def environment(self) -> list[dict[str, str]]:
        return self._environment(self.machines[0].address, "eth0", next(_ports))

    @override
    def enter(self, rank: int) -> None:
        self.machines[rank].enter()


@contextmanager
def machines(workers: int, rate: str | None) -> Iterator[Place]:
    """Workers with a link of that rate each; None: on the loopback. Errors as in :func:`linked_namespaces`."""
    if rate is None:
        yield Place(workers)
    else:
        with linked_namespaces(workers, rate) as made:
            yield Machines(workers, tuple(made))


def sent_bytes(device: str = "eth0") -> int | None:
    """Bytes that a device of this process's network has sent, headers included; None if there is no such device."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == device:
            return int(figures.split()[8])
    return None


def _find_program(program: str) -> str | None:
    """The program's path, also where ``/usr/sbin`` is not on the path."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(program: str, *arguments: str, check: bool = True) -> None:
    command = [_find_program(program) or program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if check and done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
