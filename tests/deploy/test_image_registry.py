"""The build of the image where its base image cannot be pulled."""

from __future__ import annotations

import os
import socket
import subprocess

from tests.support.paths import ROOT
from tests.support.programs import needed


def test_a_registry_that_cannot_be_reached_is_one_line() -> None:
    needed("podman")
    with socket.create_server(("127.0.0.1", 0)) as one:
        registry = f"127.0.0.1:{one.getsockname()[1]}"
    done = subprocess.run(
        [ROOT / "deploy" / "image" / "build.sh"],
        env={**os.environ, "ENGINE": "podman", "BASE_IMAGE": f"{registry}/debian:bookworm"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("build: cannot pull the base image: ") and registry in done.stderr
    assert "set BASE_IMAGE to one that is here or can be pulled" in done.stderr
