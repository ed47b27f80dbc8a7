"""Programs of the distribution that tests of deployments need (deploy/test_packages.sh installs them)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import NoReturn

import pytest


def needed(*names: str) -> tuple[str, ...]:
    """Their paths. Skips the test if one is missing, or fails it where TANDEM_REQUIRE_PROGRAMS is set."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        lacking(f"{', '.join(missing)} not installed; deploy/test_packages.sh installs what tests of deployments need")
    return tuple(str(shutil.which(name)) for name in names)


def needed_package(name: str) -> None:
    """The same for a Python package."""
    if importlib.util.find_spec(name) is None:
        lacking(f"the Python package {name} is not installed; `make setup` installs it")


def lacking(fault: str) -> NoReturn:
    """Skips the test because this machine lacks something, or fails it where TANDEM_REQUIRE_PROGRAMS is set."""
    if os.environ.get("TANDEM_REQUIRE_PROGRAMS"):
        pytest.fail(fault)
    pytest.skip(fault)
