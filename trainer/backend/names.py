"""The names of the training backends, which are the folders beside this file. Imports no torch."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from tandem.protos.error_text import did_you_mean


def known_backend(name: str) -> str:
    """Returns the name. Raises ValueError, with the nearest name, if there is no such backend."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.ispkg)
    if name not in names:
        raise ValueError(f"there is no training backend {name!r}{did_you_mean(name, names)}")
    return name
