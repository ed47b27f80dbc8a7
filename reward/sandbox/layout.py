"""The machine's files that are visible in a sandbox: only those that Python needs, read-only."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.protos.errors import ScorerError

PACKAGES_FOLDER = "/packages"

_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Layout:
    """The root of a sandbox. All paths are absolute."""

    binds: tuple[tuple[str, str], ...]
    """(path on the machine, path in the sandbox) of files and whole folders."""
    links: tuple[tuple[str, str], ...]
    """(symbolic link, its target). Links are created first."""
    devices: tuple[str, ...]
    hidden: tuple[str, ...]
    """Folders below the binds that appear empty: installed packages and Tandem itself."""
    path: tuple[str, ...]
    """`sys.path` in the sandbox."""
    stage: str
    """A folder to mount the root on. Only the mount namespace of the builder changes."""


def layout_for(packages: Sequence[str] = ()) -> Layout:
    """Returns a root with the standard library and the given installed packages, named as in `import`. Packages that
    these import must be named as well. Raises ScorerError for one that is not installed.
    """
    links = tuple((path, os.readlink(path)) for path in _SYSTEM_LIBRARIES if os.path.islink(path))
    places = (*_SYSTEM_LIBRARIES, *_SYSTEM_FILES)
    binds = [(path, path) for path in places if os.path.exists(path) and not os.path.islink(path)]
    # Paths of Python's base installation, not of a virtual environment.
    roots = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    roots |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    paths = sysconfig.get_paths(vars=roots)
    libraries = dict.fromkeys((paths["stdlib"], paths["platstdlib"], os.path.join(paths["platstdlib"], "lib-dynload")))
    for folder in libraries:
        if os.path.isdir(folder) and not _within(folder, binds):
            binds.append((os.path.realpath(folder), folder))
    for package in packages:
        binds += _package_binds(package)
    hidden = [os.path.join(folder, name) for folder in libraries for name in ("site-packages", "dist-packages")]
    hidden += ["/usr/lib/python3/dist-packages"]
    hidden += [str(_PROJECT)] if _within(str(_PROJECT), binds) else []
    return Layout(
        binds=tuple(binds),
        links=links,
        devices=tuple(filter(os.path.exists, _DEVICES)),
        hidden=tuple(hidden),
        path=(*libraries, *([PACKAGES_FOLDER] if packages else [])),
        stage="/tmp" if os.path.isdir("/tmp") and not os.path.islink("/tmp") else "/dev",
    )


def _within(path: str, binds: Sequence[tuple[str, str]]) -> bool:
    return any(path == target or path.startswith(target + "/") for _, target in binds)


def _package_binds(package: str) -> list[tuple[str, str]]:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise ScorerError(f"packages: {package} is not installed where the scorer runs")
    places = [Path(place) for place in spec.submodule_search_locations or [str(spec.origin)]]
    libraries = places[0].parent / f"{package}.libs"  # shared libraries of a wheel
    if libraries.is_dir():
        places.append(libraries)
    return [(str(place.resolve()), f"{PACKAGES_FOLDER}/{place.name}") for place in places]
