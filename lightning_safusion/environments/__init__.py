"""Where processes come from, beyond the launchers that Lightning knows."""

from lightning_safusion.integration.horovod import HorovodEnvironment

__all__ = ["HorovodEnvironment"]
