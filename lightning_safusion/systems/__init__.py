"""Systems: every published scheme is one row of parts, described once."""

from lightning_safusion.systems.rows import DEFAULT, SYSTEMS, EngineSystem, HookSystem, System, resolve_system

__all__ = ["DEFAULT", "SYSTEMS", "EngineSystem", "HookSystem", "System", "resolve_system"]
