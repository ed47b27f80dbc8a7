"""Loads users' modules into the process in which environments run, and describes their errors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

_MAX_DETAIL = 500


class ContractError(Exception):
    """A class is no environment, or it returned something that the contract does not allow."""


def load_module(place: str, path: str) -> ModuleType:
    """The module `module.path` or `file.py`, loaded once. Raises ContractError, which names `path`, if there is no
    such file.
    """
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place)
    if not file.is_file():
        raise ContractError(f"{path}: {file} is no file (looked in {Path.cwd()})")
    name = f"tandem_environment_{file.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file.absolute()):
        return loaded
    sys.path.insert(0, str(file.parent.resolve()))  # as `python file.py` does, for imports from its folder
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up a class's module there
    spec.loader.exec_module(module)
    return module


def described(error: BaseException) -> str:
    """One line: the exception and where the user's code raised it."""
    if isinstance(error, ContractError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_DETAIL] + place
