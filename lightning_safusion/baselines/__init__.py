"""DDP with another communication hook: what a system without the engine does."""

from lightning_safusion.baselines.exchanges import hook_exchange

__all__ = ["hook_exchange"]
