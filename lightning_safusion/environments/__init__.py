"""Where processes come from, beyond the launchers that Lightning knows."""

from lightning_safusion.environments.horovod import HorovodEnvironment

__all__ = ["HorovodEnvironment"]
