"""Loads training backends. Each is a folder beside this file with `options.py` (`check`) and `engine.py` (see
`tandem.trainer.backend.base.Backend`). Imports no torch until a backend is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from tandem.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from tandem.trainer.backend.base import Backend

STORE_FILE = "TANDEM_RANK_STORE"
"""File in which the ranks of one machine meet. Without it they meet at torchrun's MASTER_ADDR and MASTER_PORT."""
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE_FILE}
"""The environment variables that make a process a rank."""


def check_backend(config: TrainerConfig) -> None:
    """Raises ConfigError if the backend's package is missing, or settings do not fit the backend."""
    import_module(f"{__package__}.{config.backend}.options").check(config)


def load_backend(config: TrainerConfig) -> Backend:
    """The functions of the configured backend. Raises ConfigError as `check_backend` does."""
    check_backend(config)
    return cast("Backend", import_module(f"{__package__}.{config.backend}.engine"))
