"""Processes that horovodrun or mpirun has started."""

from __future__ import annotations

import os
import socket
from types import ModuleType
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_safusion.comm.transport.horovod import load_horovod, start_horovod

# Set by horovodrun over Gloo, Open MPI, and MPICH, Intel MPI and their like.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class HorovodEnvironment(ClusterEnvironment):
    """Takes ranks from Horovod, which is initialised when Lightning first asks.

    Rank 0 chooses address and port of torch's process group, or takes its variables ``MASTER_ADDR`` and
    ``MASTER_PORT``, for clusters where only some ports are open, and broadcasts them through Horovod.

    Example::

        # horovodrun -np 2 python train.py
        strategy = SAFusionStrategy(transport="horovod")  # takes this environment by itself
        Trainer(accelerator="cpu", devices=2, strategy=strategy)
    """

    def __init__(self) -> None:
        super().__init__()
        self._hvd: ModuleType | None = None
        self._main: tuple[str, int] = ("", 0)

    @staticmethod
    @override
    def detect() -> bool:
        """Whether horovodrun or an mpirun started this process."""
        return any(variable in os.environ for variable in _RANK_VARIABLES)

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        self._start()
        return self._main[0]

    @property
    @override
    def main_port(self) -> int:
        self._start()
        return self._main[1]

    @override
    def world_size(self) -> int:
        return int(self._start().size())

    @override
    def set_world_size(self, size: int) -> None:
        """Does nothing: the number of processes is Horovod's."""

    @override
    def global_rank(self) -> int:
        return int(self._start().rank())

    @override
    def set_global_rank(self, rank: int) -> None:
        """Does nothing: ranks are Horovod's."""

    @override
    def local_rank(self) -> int:
        return int(self._start().local_rank())

    @override
    def node_rank(self) -> int:
        return int(self._start().cross_rank())

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compares the Trainer's arguments with what was started.

        Raises:
            ValueError: If they differ.
        """
        hvd = self._start()
        started = hvd.local_size(), hvd.cross_size()
        if (num_devices, num_nodes) != started:
            raise ValueError(
                f"Horovod has started {started[0]} processes on each of {started[1]} nodes, but the Trainer was given "
                f"devices={num_devices}, num_nodes={num_nodes}: give it devices={started[0]}, num_nodes={started[1]}, "
                f"or start `horovodrun -np {num_devices * num_nodes}`"
            )

    def _start(self) -> ModuleType:
        if self._hvd is None:
            hvd = start_horovod()
            # all ranks start Horovod; main_address may be read on one rank alone
            self._main = hvd.broadcast_object(_choose_main(hvd), name="lightning_safusion.main")
            self._hvd = hvd
        return self._hvd


def _choose_main(hvd: ModuleType) -> tuple[str, int]:
    """Address and port of torch's process group, as rank 0 would have them."""
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        # Under horovodrun the name of this host in its list, by which the other hosts know it.
        host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        address = "127.0.0.1" if hvd.cross_size() == 1 else host
    port = os.environ.get("MASTER_PORT")
    return address, int(port) if port is not None else find_free_network_port()


def configure_horovod(options: dict[str, Any]) -> None:
    """Completes the arguments of DDPStrategy where Horovod carries the gradients; changes ``options``.

    DDP's own process group carries parameters at the start, buffers and control messages. It uses gloo, because two
    stacks of NCCL can deadlock.

    Raises:
        ModuleNotFoundError: If Horovod is not installed, with the way to install it.
        MisconfigurationException: If an argument does not go with Horovod.
    """
    backend = options.get("process_group_backend") or "gloo"
    if backend != "gloo":
        raise MisconfigurationException(
            f"transport='horovod' keeps torch's process group for control messages and needs "
            f"process_group_backend='gloo' (the default here), got {backend!r}: two NCCL stacks can deadlock."
        )
    if options.get("process_group") is not None:
        raise MisconfigurationException(
            "transport='horovod' exchanges over all processes that Horovod has started: leave process_group out, or "
            "use transport='torch'."
        )
    if options.get("start_method", "popen") != "popen":
        raise MisconfigurationException(
            f"transport='horovod' takes processes that horovodrun or mpirun has started, not "
            f"start_method={options['start_method']!r}: leave start_method out and start "
            "`horovodrun -np 2 python train.py`."
        )
    load_horovod()
    options["process_group_backend"] = backend
    if options.get("cluster_environment") is None and HorovodEnvironment.detect():
        options["cluster_environment"] = HorovodEnvironment()


def check_horovod(model: nn.Module, started: int, wanted: int) -> None:
    """Refuses jobs that would hang, or whose workers would not train together.

    Raises:
        MisconfigurationException: If the numbers of processes that Horovod has ``started`` and that Lightning has
            ``wanted`` differ, or the model holds SyncBatchNorm layers.
    """
    if started != wanted:
        raise MisconfigurationException(
            f"transport='horovod': Lightning trains with {wanted} processes, Horovod has started {started}. Start all "
            f"of them with `horovodrun -np {wanted} python train.py` (or mpirun), or use transport='torch'."
        )
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if layers:
        raise MisconfigurationException(
            f"transport='horovod' does not go with SyncBatchNorm ({', '.join(layers[:5])}): its exchange inside the "
            "backward pass runs on another communicator. Leave sync_batchnorm=False, or use transport='torch'."
        )
