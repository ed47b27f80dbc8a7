"""Builds wheels for tests and environments with them installed, all without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

SOURCES = ("protos", "reward", "rollout", "services", "tandem", "trainer")
_DEADLINE_SECONDS = 100.0


def pip(*arguments: str | Path) -> str:
    """The output of this environment's pip. Fails the test if pip fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(project: Path, folder: Path) -> Path:
    """The wheel of the project, built in `folder`."""
    pip("wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder, project.resolve())
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_sources(folder: Path) -> Path:
    """A copy of the sources of Tandem's wheel, because building leaves files beside the sources."""
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def install(wheel: Path, folder: Path) -> Path:
    """A folder for PYTHONPATH with the wheel in it."""
    pip("install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", folder, wheel)
    return folder


def fresh_environment(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """The interpreter and site-packages of a virtual environment with only the wheel and its base requirements."""
    venv.create(folder, symlinks=True, with_pip=False)
    pip("--python", folder / "bin" / "python", "install", "-q", "--no-index", "--no-deps", "--no-compile", wheel)
    return link_requirements(folder, "")


def with_extra(folder: Path, base: Path, extra: str) -> tuple[Path, Path]:
    """The interpreter and site-packages of a copy of a fresh environment with the requirements of an extra."""
    shutil.copytree(base, folder, symlinks=True)
    return link_requirements(folder, extra)


def link_requirements(folder: Path, extra: str) -> tuple[Path, Path]:
    """Links the packages that the wheel and its extra require to those of this environment: nothing is downloaded.

    Returns the interpreter and the site-packages, which passed `pip check`.
    """
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (info,) = site.glob("tandem_rl-*.dist-info")
    lines = (info / "METADATA").read_text().splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    for name in _closure(required, extra):
        for file in distribution(name).files or ():
            if not file.is_absolute() and ".." not in file.parts and not (site / file).is_symlink():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(distribution(name).locate_file(file))
    pip("--python", python, "check")
    return python, site


def _closure(texts: Iterable[str], extra: str) -> Iterator[str]:
    """The names of all packages that these requirements of a package with this extra need, each once."""
    waiting = [(Requirement(text), extra) for text in texts]
    seen, yielded = set[tuple[str, str]](), set[str]()
    while waiting:
        requirement, wanted = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": wanted}):
            continue
        if name not in yielded:
            yielded.add(name)
            yield name
        for one in {"", *requirement.extras}:
            if (name, one) not in seen:
                seen.add((name, one))
                waiting += [(Requirement(text), one) for text in distribution(name).requires or ()]
