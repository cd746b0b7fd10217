"""What is said to the user, with and without Lightning: lines and warnings on rank 0, and errors of a wrong set-up."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
else:
    try:
        from lightning.pytorch.utilities.exceptions import MisconfigurationException
        from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
    except ImportError:  # plain torch: see lightning_safusion.attach
        _log = logging.getLogger("lightning_safusion")

        class MisconfigurationException(Exception):  # Lightning's name
            """The parts of a job do not go together."""

        def _is_first() -> bool:
            return os.environ.get("RANK", "0") == "0"

        def rank_zero_info(text: str) -> None:
            """Logs a line, on rank 0."""
            if _is_first():
                _log.info(text)

        def rank_zero_warn(text: str) -> None:
            """Warns, on rank 0."""
            if _is_first():
                warnings.warn(text, stacklevel=3)


__all__ = ["MisconfigurationException", "announce", "rank_zero_info", "rank_zero_warn"]


def announce(text: str) -> None:
    """Prints one line, on rank 0."""
    rank_zero_info(f"SAFusion: {text}.")
