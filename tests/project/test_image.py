"""What a build of the image takes from the builder's pip, and what it leaves out."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

IMAGE = ROOT / "deploy" / "image"


def settings_of(folder: Path, **variables: str) -> tuple[configparser.SectionProxy, list[str]]:
    out = folder / "out"
    out.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | variables
    command = [sys.executable, IMAGE / "pip_settings.py", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    conf = configparser.RawConfigParser()
    conf.read(out / "pip.conf")
    return conf["global"], (out / "folders").read_text().splitlines()


@pytest.fixture
def indexes(tmp_path: Path) -> Path:
    for name in ("wheels", "mirror/simple", "mirror/files"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ca.pem").write_text("authorities")
    (tmp_path / "pip.conf").write_text(f"""[global]
find-links = {tmp_path}/wheels {tmp_path}/missing https://wheels.example/list
extra-index-url = file://{tmp_path}/mirror/simple
cert = {tmp_path}/ca.pem
user = yes
""")
    return tmp_path


def test_indexes_and_local_folders_are_those_of_pip(indexes: Path) -> None:
    conf, folders = settings_of(indexes, PIP_CONFIG_FILE=str(indexes / "pip.conf"), PIP_TIMEOUT="7")
    assert folders == [f"{indexes}/wheels", f"{indexes}/mirror"], "the files of an index lie beside it"
    assert conf["extra-index-url"] == f"file://{indexes}/mirror/simple" and conf["timeout"] == "7"
    assert "cert" not in conf and "user" not in conf, "the build has another path for the one, and no use for the other"
    assert (indexes / "out/ca").read_text() == "authorities"


def test_a_variable_overrides_a_file(indexes: Path) -> None:
    (indexes / "other").mkdir()
    variables = {"PIP_CONFIG_FILE": str(indexes / "pip.conf"), "PIP_FIND_LINKS": f"{indexes}/other"}
    conf, folders = settings_of(indexes, **variables)
    assert conf["find-links"] == f"{indexes}/other" and f"{indexes}/other" in folders
    assert f"{indexes}/wheels" not in folders


def test_an_unknown_flavour_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", IMAGE / "packages.sh", "tpu"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == "packages: FLAVOUR=tpu is none of cpu, gpu-rollout, gpu-trainer\n"


def test_the_context_holds_every_file_that_the_image_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored, "all but what is named"
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copies = [line.split()[1:-1] for line in (IMAGE / "Dockerfile").read_text().splitlines() if line[:5] == "COPY "]
    copied = {name for names in copies if not names[0].startswith("--from") for name in names}
    assert copied == kept and all((ROOT / name).exists() for name in kept)
