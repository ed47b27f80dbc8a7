"""The set-up: pins lie within their ranges, and a wrong environment gives a one-line error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "deploy").mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "constraints-cpu.txt", "deploy/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    command, variables = [folder / "deploy/setup.sh"], {**os.environ, "EXTRA": "", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


def test_every_requirement_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints-cpu.txt").read_text().lower().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for name in extras if name != "gpu" for text in extras[name])]
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            assert requirement.extras <= set(extras), requirement
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        pin = pins.get(name) or pins.get(name.replace("-", "_"))
        assert pin, f"{name} is not in constraints-cpu.txt; run make lock"
        assert requirement.specifier.contains(pin), f"{name}=={pin} is outside {requirement.specifier}; run make lock"


def test_the_pins_contain_no_cuda_packages() -> None:
    pins = (ROOT / "constraints-cpu.txt").read_text()
    assert not re.search(r"(?im)^(nvidia|cuda|triton|torchvision|torchaudio|torchcodec)", pins)


def test_a_wrong_setting_is_a_one_line_error(tmp_path: Path) -> None:
    for name, value, complaint in (
        ("PYTHON", "/nowhere/python3", "found no Python 3.11 or 3.12 as /nowhere/python3"),
        ("EXTRA", "tpu", "EXTRA=tpu is unknown"),
    ):
        done = run_setup(tmp_path, **{name: value})
        assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("fetched", [True, False])
def test_bubblewrap_is_unpacked_beside_the_interpreter_or_reported_missing(tmp_path: Path, fetched: bool) -> None:
    """Runs the script's own steps with fakes for the commands that fetch and unpack a package."""
    script = (ROOT / "deploy/setup.sh").read_text()
    functions = script[script.index("unpack() {") : script.index('if [ "$EXTRA" = cpu ]; then\n    if ! has_libnuma')]
    step = re.search(r'^if \[ -z "\$LOCK" \] && ! has_bubblewrap; then\n.*?^fi\n', script, re.DOTALL | re.MULTILINE)
    assert step is not None
    stand_ins = {
        "apt-get": ': >"${@: -1}_1_all.deb"' if fetched else "exit 1",
        "dpkg": f"mkdir -p unpacked/usr/bin; cp {tmp_path}/bwrap unpacked/usr/bin/bwrap",
    }
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    commands, venv = tmp_path / "commands", tmp_path / "venv"
    for folder in (commands, venv / "bin"):
        folder.mkdir(parents=True)
    for name, text in stand_ins.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    for name in ("bash", "sh", "mkdir", "cp", "rm", "chmod", "timeout"):
        (commands / name).symlink_to(str(shutil.which(name)))
    head = f'set -euo pipefail\nVENV={venv} LOG={tmp_path}/log LOCK=\nsay() {{ printf "setup: %s\\n" "$*"; }}\n'
    command, variables = ["bash", "-c", head + functions + step[0]], {"PATH": str(commands)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stdout.splitlines()
    assert ("unpacked into" if fetched else "could not be fetched") in line
    assert (venv / "bin/bwrap").exists() == fetched and [one.name for one in venv.iterdir()] == ["bin"]


def test_an_environment_of_another_tool_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    done = run_setup(tmp_path)
    assert done.returncode == 2
    assert "was not made by deploy/setup.sh" in done.stderr
    assert (tmp_path / ".venv/bin/python").exists()
