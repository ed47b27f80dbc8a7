"""Programs of the distribution that tests of deployments need (deploy/test_packages.sh installs them)."""

from __future__ import annotations

import os
import shutil

import pytest


def needed(*names: str) -> tuple[str, ...]:
    """Their paths. Skips the test if one is missing, or fails it where TANDEM_REQUIRE_PROGRAMS is set."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        fault = f"{', '.join(missing)} not installed; deploy/test_packages.sh installs what tests of deployments need"
        if os.environ.get("TANDEM_REQUIRE_PROGRAMS"):
            pytest.fail(fault)
        pytest.skip(fault)
    return tuple(str(shutil.which(name)) for name in names)
