"""Finds training backends: each is a folder beside this file with `options.py` (`check`) and `engine.py` (see
`tandem.trainer.backend.base.Backend`). Imports no torch until a backend is loaded.
"""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tandem.trainer.backend.base import Backend
    from tandem.trainer.config import TrainerConfig


def backend_names() -> list[str]:
    """The folders beside this file."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.ispkg)


def known_backend(name: str) -> str:
    """The name itself. Raises ValueError, with the nearest name, if there is no such backend."""
    names = backend_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"take {' or '.join(names)}"
        raise ValueError(f"there is no training backend {name!r}; {hint}")
    return name


def check_backend(config: TrainerConfig) -> None:
    """Raises ConfigError if the backend's package is missing, or settings do not fit the backend."""
    import_module(f"{__package__}.{config.backend}.options").check(config)


def load_backend(config: TrainerConfig) -> Backend:
    """The functions of the configured backend. Raises ConfigError as `check_backend` does."""
    check_backend(config)
    return cast("Backend", import_module(f"{__package__}.{config.backend}.engine"))
