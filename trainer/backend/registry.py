"""Loads training backends. Each is a folder beside this file with `options.py` (`check`) and `engine.py` (see
`tandem.trainer.backend.base.Backend`). Imports no torch until a backend is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from tandem.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from tandem.trainer.backend.base import Backend

RANK_STORE = "TANDEM_RANK_STORE"
"""The variable that holds the `StoreSource` of the ranks as JSON."""
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", RANK_STORE}
"""The environment variables that make a process a rank."""


def check_backend(config: TrainerConfig) -> None:
    """Raises ConfigError if the backend's package is missing, or settings do not fit the backend."""
    import_module(f"{__package__}.{config.backend}.options").check(config)


def load_backend(config: TrainerConfig) -> Backend:
    """The functions of the configured backend. Raises ConfigError as `check_backend` does."""
    check_backend(config)
    return cast("Backend", import_module(f"{__package__}.{config.backend}.engine"))
