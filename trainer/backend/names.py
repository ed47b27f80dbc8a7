"""The names of the training backends, which are the folders beside this file. Imports no torch."""

from __future__ import annotations

import difflib
import pkgutil
from pathlib import Path


def backend_names() -> list[str]:
    """The names of all backends, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.ispkg)


def known_backend(name: str) -> str:
    """Returns the name. Raises ValueError, with the nearest name, if there is no such backend."""
    names = backend_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"take {' or '.join(names)}"
        raise ValueError(f"there is no training backend {name!r}; {hint}")
    return name
