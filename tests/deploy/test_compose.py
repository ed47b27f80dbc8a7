"""The compose file runs: deploy/compose/smoke.sh brings it up, scales it, kills a container and checks the ledger."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.paths import ROOT
from tests.support.programs import needed


@pytest.mark.timeout(900)
def test_the_profile_cpu_trains_scales_and_survives_kills() -> None:
    if os.geteuid() != 0:
        pytest.skip("podman with a base image of debootstrap needs root")
    needed("podman", "runc", "debootstrap")
    done = subprocess.run(
        [ROOT / "deploy/compose/smoke.sh"],
        env={**os.environ, "ENGINE": "podman"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    said = [line.split(" s: ", 1)[-1] for line in done.stdout.splitlines() if line.startswith("smoke:")]
    print(done.stdout)  # the seconds of each step
    assert said[-1] == "passed", said
