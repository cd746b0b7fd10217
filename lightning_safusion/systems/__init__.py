"""Systems: every published scheme is one row of parts, described once."""

from lightning_safusion.systems.rows import (
    DEFAULT,
    SHARDED_ROWS,
    SYSTEMS,
    EngineSystem,
    HookSystem,
    System,
    resolve_system,
    sharded_names,
)

__all__ = [
    "DEFAULT",
    "SHARDED_ROWS",
    "SYSTEMS",
    "EngineSystem",
    "HookSystem",
    "System",
    "resolve_system",
    "sharded_names",
]
