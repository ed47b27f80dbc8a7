"""The set-up: pins within their ranges, one-line errors, and what `make setup` does with fakes for its tools."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "deploy").mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "constraints-cpu.txt", "deploy/setup.sh", "deploy/stubs.sh"):
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


def test_an_environment_of_another_tool_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    done = run_setup(tmp_path)
    assert done.returncode == 2
    assert "was not made by deploy/setup.sh" in done.stderr
    assert (tmp_path / ".venv/bin/python").exists()


_A_TO_H = ("basename", "cat", "cp", "cut", "dirname", "env", "find", "flock", "grep", "head")
TOOLS = (*_A_TO_H, "ls", "make", "mkdir", "mktemp", "rm", "sed", "sha256sum", "tail", "timeout", "touch")
"""Real tools of a Debian with make; each also writes its name to $TRACE."""

PYTHON = r"""
here=${0%/bin/*}
case "$*" in
*realpath*) /bin/readlink -f "$0" ;;
*_base_executable*) echo "$0" ;;
*perf_counter*) echo "${0%/*}" >>"$TRACE.timed" && /bin/cat "${0%/*}/microseconds" ;;
"-m venv "*) /bin/mkdir -p "$3/bin" "$3/lib/site" && /bin/cp "$0" "$3/bin/python" ;;
*"install --progress-bar off pip=="*"$INTERRUPTED") kill -INT $PPID; exit 1 ;;
*"install --progress-bar off pip=="*) /bin/mkdir -p "$here/lib/site/triton-9.9.dist-info" ;;
*sysconfig*) echo "$here/lib/site" ;;
*libnuma*) [ -e "$here/lib/libnuma.so.1" ] ;;
esac
"""
"""An interpreter that accepts every command, has triton, and lacks libnuma until its environment has it. `microseconds`
beside it is what a loop takes.
"""

APT_GET = r"""
case "$*" in
*Dir::State::Lists=*" update") [ -z "$OFFLINE" ] && : >lists/fetched ;;
*" download $LACKING") exit 100 ;;
*Dir::State::Lists=*" download "*) [ -e lists/fetched ] && : >"${@: -1}_1_amd64.deb" ;;
*) exit 100 ;;
esac
"""
"""apt-get of a minimal image: it has no package lists, and only root may fetch them to the default folder."""

DPKG = r"""
[ "$1" = -x ] && [ -e "$2" ] && /bin/mkdir -p "$3/usr/bin" "$3/usr/lib/x86_64-linux-gnu" || exit 1
case "$2" in
libnuma1_*) echo numa >"$3/usr/lib/x86_64-linux-gnu/libnuma.so.1" ;;
bubblewrap_*) printf '#!/bin/sh\n' >"$3/usr/bin/bwrap" && /bin/chmod +x "$3/usr/bin/bwrap" ;;
esac
"""


class Machine:
    """A checkout of the files that the set-up reads, and a PATH of scripts that record every start."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.trace = folder / "tandem", folder / "bin", folder / "trace"
        self.venv = self.checkout / ".venv"
        self.bin.mkdir()
        (self.checkout / "deploy").mkdir(parents=True)
        files = ("Makefile", "pyproject.toml", "setup.py", "constraints-cpu.txt", "deploy/setup.sh", "deploy/stubs.sh")
        for name in files:
            shutil.copy(ROOT / name, self.checkout / name)
        for name in TOOLS:
            self._script(name, f'exec {shutil.which(name)} "$@"')
        self._script("python3", PYTHON)
        self._script("apt-get", APT_GET)
        self._script("dpkg", DPKG)
        (self.bin / "bash").symlink_to("/bin/bash")

    def add_python(self, folder: Path, microseconds: object) -> Path:
        """Another interpreter, python3 of the folder."""
        folder.mkdir()
        (folder / "microseconds").write_text(f"{microseconds}\n")
        return shutil.copy(self.bin / "python3", folder / "python3")

    def _script(self, name: str, does: str) -> None:
        file = self.bin / name
        file.write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >>"$TRACE"\n{does.strip()}\n')
        file.chmod(0o755)

    def setup(self, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Runs `make setup`; returns its result and the sorted names of the commands it started."""
        self.trace.write_text("")
        surroundings = {
            "PATH": str(self.bin),
            "TRACE": str(self.trace),
            "OFFLINE": "",
            "LACKING": "-",
            "INTERRUPTED": "-",
        }
        command = [self.bin / "make", "-C", self.checkout, "--no-print-directory", "setup"]
        done = subprocess.run(
            command, env=surroundings | environment, capture_output=True, text=True, timeout=60, check=False
        )
        started = [line.split()[0] for line in self.trace.read_text().splitlines()]
        return done, sorted(started)

    def calls_of(self, name: str) -> list[str]:
        """The arguments of a command's calls in the last set-up."""
        return [
            line.removeprefix(f"{name} ") for line in self.trace.read_text().splitlines() if line.split()[0] == name
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_setup_only_compares_a_fingerprint(machine: Machine) -> None:
    done, started = machine.setup()
    assert done.returncode == 0, done.stderr
    assert "setup: ready in" in done.stdout and "python" in started and "apt-get" in started
    before = {path: path.stat().st_mtime_ns for path in machine.venv.rglob("*")}

    done, started = machine.setup()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert started == ["cat", "cut", "dirname", "make", "sed", "sha256sum"]
    assert {path: path.stat().st_mtime_ns for path in machine.venv.rglob("*")} == before

    with (machine.checkout / "constraints-cpu.txt").open("a") as pins:
        pins.write("another==1.0\n")
    done, started = machine.setup()
    assert done.returncode == 0 and "python" in started, "other pins are another environment"


@pytest.mark.parametrize(("microseconds", "chosen"), [((1000, 900), 0), ((1000, 1300, 810, 800), 3)])
def test_the_first_interpreter_is_used_unless_another_is_much_faster(
    machine: Machine, tmp_path: Path, microseconds: tuple[int, ...], chosen: int
) -> None:
    pythons = [machine.add_python(tmp_path / f"python {number}", micros) for number, micros in enumerate(microseconds)]
    pythons[1].with_name("python3.12").symlink_to(pythons[0])
    machine.add_python(tmp_path / "broken", "no number")
    (machine.bin / "microseconds").write_text("2000\n")
    path = ":".join([*(str(python.parent) for python in pythons), str(tmp_path / "broken"), str(machine.bin)])
    done, _ = machine.setup(PATH=path)
    assert f"setup: virtual environment on {pythons[chosen]}: " in done.stdout
    said = f"setup: {pythons[0]} takes 125 % of the time of {pythons[3]}; using the latter" if chosen else ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(chosen)
    timed = Path(f"{machine.trace}.timed")
    folders = Counter(timed.read_text().splitlines())
    assert folders[str(pythons[0].parent)] == folders[str(pythons[1].parent)] == 3, "a link is not another interpreter"

    shutil.rmtree(machine.venv)
    timed.unlink()
    done, _ = machine.setup(PATH=path, PYTHON=str(pythons[1]))
    assert f"virtual environment on {pythons[1]}: " in done.stdout and not timed.exists(), "a choice is not measured"


def test_unused_packages_are_installed_as_metadata_only(machine: Machine) -> None:
    machine.setup()
    site = machine.venv / "lib" / "site"
    stubs = {found.metadata["Name"]: found for found in distributions(path=[str(site)]) if found.read_text("INSTALLER")}
    versions = {"torchvision": "0.28.0+stub", "torchaudio": "2.13.0+stub", "torchcodec": "0.14.0+stub"}
    assert {name: stub.version for name, stub in stubs.items()} == versions, "triton is there already"
    for stub in stubs.values():
        files = stub.files or []
        assert {file.name for file in files} == {"METADATA", "INSTALLER", "RECORD"}, "pip can take it away again"
        assert all((site / file).is_file() for file in files)


def test_a_missing_library_is_unpacked_without_root_and_loaded_by_a_pth_file(machine: Machine) -> None:
    done, _ = machine.setup()
    assert "libnuma.so.1: unpacked into" in done.stdout
    assert (machine.venv / "lib" / "libnuma.so.1").read_text() == "numa\n"
    (line,) = (machine.venv / "lib" / "site" / "tandem_libnuma.pth").read_text().splitlines()
    assert line.startswith("import ") and 'sys.prefix + "/lib/libnuma.so.1"' in line
    compile(line, "tandem_libnuma.pth", "exec")
    assert not (machine.venv / "libnuma").exists(), "nothing is left of the download"
    assert [call for call in machine.calls_of("apt-get") if " install" in call] == []
    lists = machine.venv / "libnuma" / "lists"
    first, update, download = [call for call in machine.calls_of("apt-get") if "bubblewrap" not in call][:3]
    assert first.endswith("download libnuma1") and "Dir::State" not in first, "the system's own lists first"
    assert f"Dir::State::Lists={lists}" in update and f"Dir::State::Lists={lists}" in download


def test_an_installed_library_is_not_fetched(machine: Machine) -> None:
    machine.setup()
    for stamp in machine.venv.glob(".stamp-*"):
        stamp.unlink()
    done, started = machine.setup()
    assert done.returncode == 0 and "apt-get" not in started and "libnuma" not in done.stdout


def test_a_library_that_cannot_be_fetched_is_reported_with_its_package(machine: Machine) -> None:
    done, _ = machine.setup(OFFLINE="1")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("setup: ")]
    assert line.endswith(
        "libnuma.so.1 is missing and could not be fetched without root; install it: apt-get install libnuma1"
    )
    done, _ = machine.setup()
    assert done.returncode == 0 and "did not finish; starting afresh" in done.stdout


def test_ctrl_c_ends_the_set_up_also_where_a_failure_is_allowed(machine: Machine) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background bash would ignore it
    try:
        done, _ = machine.setup(INTERRUPTED="")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode != 0 and "ready in" not in done.stdout and "setup: " not in done.stderr
    done, _ = machine.setup()
    assert done.returncode == 0 and "did not finish; starting afresh" in done.stdout


@pytest.mark.parametrize("fetched", [True, False])
def test_bubblewrap_is_unpacked_beside_the_interpreter_or_reported_missing(machine: Machine, fetched: bool) -> None:
    done, _ = machine.setup(LACKING="-" if fetched else "bubblewrap")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("setup: bubblewrap")]
    assert done.returncode == 0 and ("unpacked into" if fetched else "could not be fetched") in line
    assert (machine.venv / "bin" / "bwrap").exists() == fetched and not (machine.venv / "bubblewrap").exists()
