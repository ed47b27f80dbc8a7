"""Loads plug-ins: scorers, losses and estimators that other packages add by entry points (docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar

from tandem.protos.errors import PluginError

T = TypeVar("T")


def find_plugins(group: str, kind: type[T], built_in: Collection[str]) -> dict[str, Callable[[], type[T]]]:
    """A loader for the class of each entry point of a group, by name. Raises PluginError if a name is taken; a loader
    raises it if its entry point cannot be imported or is no subclass of `kind`.
    """
    found: dict[str, Callable[[], type[T]]] = {}
    for point in entry_points(group=group):
        if point.name in built_in:
            raise PluginError(f"{_origin(point)} has the name of a built-in one; choose another name")
        if point.name in found:
            raise PluginError(f"{_origin(point)} has the name of another package's; uninstall one of them")
        found[point.name] = partial(_load, point, kind)
    return dict(sorted(found.items()))


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `module:function`. Raises PluginError with `what` if it cannot be imported."""
    try:
        function: Callable[..., Any] = resolve_name(path)
    except Exception as error:
        raise PluginError(f"{what}: {path} does not import: {type(error).__name__}: {error}") from error
    return function


def _load(point: EntryPoint, kind: type[T]) -> type[T]:
    try:
        loaded = point.load()
    except Exception as error:
        raise PluginError(f"{_origin(point)} does not import: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise PluginError(f"{_origin(point)}: {point.value} is not a class derived from {kind.__name__}")
    return loaded


def _origin(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
    return f"entry point {point.group}: {point.name} of {package}"
