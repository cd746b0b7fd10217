"""Exchanges other than the engine: DDP with a hook of torch, DeAR, elastic averaging."""

from torch.distributed import ProcessGroup

from lightning_safusion.baselines.easgd import ElasticExchange
from lightning_safusion.baselines.hooks import HookExchange
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.integration.exchange import GradientExchange
from lightning_safusion.lookup import DDPHookName

__all__ = ["hook_exchange"]


def hook_exchange(name: DDPHookName, transport: Transport, group: ProcessGroup | None) -> GradientExchange:
    """The exchange of a system that is DDP with another hook.

    Args:
        name: Of the hook.
        transport: Communicator, for DeAR and elastic averaging.
        group: The process group that the user has given DDP; None for the default one.
    """
    if name == "dear":
        from lightning_safusion.baselines.dear import Dear  # needs Lightning

        return Dear(transport)
    if name == "local":
        return ElasticExchange(transport, group)
    return HookExchange(name, group)
