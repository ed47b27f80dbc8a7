"""How isolation is detected and reported, which files it shows, and the sandbox without it."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from tandem.protos.errors import ScorerError
from tandem.reward.sandbox import isolation
from tandem.reward.sandbox.inside import seccomp as filter_program
from tandem.reward.sandbox.isolation import Isolation, find_isolation, open_sandboxes
from tandem.reward.sandbox.launcher import (
    BareLauncher,
    BubblewrapEachLauncher,
    BubblewrapLauncher,
    find_bubblewrap,
    layout_for,
)
from tandem.reward.sandbox.sandbox import Limits, SandboxError
from tandem.services.commands import doctor
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.sandbox_runs import DAEMON, LIMITS, SECRET, alive, said, settles

REPORT = """
import sys
sys.path.insert(0, {root!r})
from tandem.protos.errors import ScorerError
from tandem.reward.sandbox.isolation import find_isolation, open_sandboxes
from tandem.reward.sandbox.sandbox import Limits
print(find_isolation().name)
try:
    open_sandboxes().close()
    print("opened")
except ScorerError as error:
    print("refused:", error)
pool = open_sandboxes(allow_unsandboxed=True)
sandbox = pool.take()
print(sandbox.run("script", ["", {program!r}], Limits()).stdout.decode().strip())
sandbox.close()
pool.close()
"""


WRITABLE = """
import os
folder = os.path.dirname(os.__file__)
paths = ("/", "/usr/lib", "/dev", folder, os.__file__)
print(os.getpid(), os.getuid(), [path for path in paths if os.access(path, os.W_OK)])
"""


def reported(program: str, *prefix: str) -> list[str]:
    """What a process reports of its isolation, started behind a command that removes a capability first."""
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"there is no {prefix[0]} here")
    command = [*prefix, sys.executable, "-c", REPORT.format(root=str(ROOT), program=program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_ordinary_user_has_the_same_isolation() -> None:
    """Runs in a user namespace in which the service is user 1000 and no other user exists."""
    name, opened, writable = reported(WRITABLE, "unshare", "--user", "--map-user=1000", "--map-group=1000")
    assert name in ("namespaces", "bubblewrap") and opened == "opened"
    assert writable == "2 65534 []", "the files of the service's own user, too, are read-only"


def test_without_user_namespaces_the_scorer_refuses_unless_allowed() -> None:
    """Runs in a user namespace that allows no further ones, as in a container that forbids them."""
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    name, refused, process = reported(
        "import os; print(os.getpid())", "unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"
    )
    assert name == "none" and int(process) > 2
    assert refused.startswith("refused: this machine has no isolation") and "allow_unsandboxed" in refused
    assert "unshare: No space left on device" in refused, "it says what was tried"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_found", None)


@pytest.mark.usefixtures("unknown")
def test_isolation_that_can_be_broken_out_of_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pretended(BareLauncher):
        name = "namespaces"

    monkeypatch.setattr(isolation, "_KINDS", (Pretended,))
    found = find_isolation()
    assert found.name == "none"
    (fault,) = found.faults
    for broken in ("tcp", "read_files", "other processes"):
        assert broken in fault
    with pytest.raises(ScorerError, match="does not hold"):
        open_sandboxes()
    with pytest.raises(ScorerError, match="does not hold"):
        open_sandboxes()  # the answer and its reason are cached


@pytest.mark.usefixtures("unknown")
def test_the_best_working_isolation_is_chosen_with_reasons_against_better_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tuple(isolation._KINDS)
    assert before[-1] is BubblewrapEachLauncher, "a Python for every sandbox is the last resort"

    class Refused(BubblewrapLauncher):
        def __init__(self, *_: object) -> None:
            raise SandboxError("it gets no namespaces")

    monkeypatch.setattr(isolation, "_KINDS", (Refused, Refused, *before))
    found = find_isolation()
    if found.name == "none":
        pytest.skip(f"no isolation here: {'; '.join(found.faults)}")
    assert found.faults[0] == "bubblewrap: it gets no namespaces" and found.faults.count(found.faults[0]) == 1
    open_sandboxes().close()
    assert find_isolation() is found


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("allowed", [False, True])
def test_isolation_that_fails_to_start_later_is_an_error(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    class Failing(BubblewrapLauncher):
        def __init__(self, *_: object) -> None:
            raise SandboxError("no memory for it now")

    monkeypatch.setattr(isolation, "_found", (Isolation("bubblewrap", True), Failing))
    with pytest.raises(ScorerError, match="of this machine does not start: bubblewrap: no memory for it now"):
        open_sandboxes(allow_unsandboxed=allowed)
    assert find_isolation().name == "bubblewrap", "it may start the next time"


@pytest.mark.usefixtures("unknown")
def test_a_missing_filter_is_reported_and_runs_work_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_filters", lambda launcher: False)
    with closing(open_sandboxes(allow_unsandboxed=True)) as made, closing(made.take()) as taken:
        assert not made.seccomp and not find_isolation().seccomp
        assert taken.run("script", ["", "import socket; socket.socket(); print(1)"], Limits()).stdout == b"1\n"


@pytest.mark.parametrize(
    ("found", "verdict", "told"),
    [
        (Isolation("bubblewrap", True, place="/opt/bin/bwrap"), "ok", "bubblewrap (/opt/bin/bwrap), with seccomp"),
        (Isolation("namespaces", False, ("bubblewrap: none on PATH",)), "note", "namespaces, without seccomp"),
        (Isolation("none", True, ("namespaces: not permitted",)), "note", "namespaces: not permitted"),
    ],
)
def test_doctor_reports_the_isolation(
    monkeypatch: pytest.MonkeyPatch, found: Isolation, verdict: str, told: str
) -> None:
    monkeypatch.setattr(isolation, "find_isolation", lambda: found)
    finding = doctor.check_sandbox()
    assert finding.verdict == verdict and told in finding.detail
    assert bool(finding.remedy) == (found.name == "none")


# ---- the root of a sandbox ----


def test_bubblewrap_is_found_on_path_or_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = [tmp_path / name / "bin" for name in ("system", "environment")]
    monkeypatch.setattr(sys, "prefix", str(places[1].parent))
    monkeypatch.setenv("PATH", str(places[0]))
    with pytest.raises(SandboxError, match=r"there is no bwrap on PATH or in .*environment/bin"):
        find_bubblewrap()
    for place in reversed(places):
        place.mkdir(parents=True)
        (place / "bwrap").write_text("#!/bin/sh\necho 'bwrap: not on this machine' >&2\nexit 1\n")
        (place / "bwrap").chmod(stat.S_IRWXU)
        assert find_bubblewrap() == str(place / "bwrap")
    with pytest.raises(SandboxError, match=r"not on this machine|No space left|not permitted"):
        BubblewrapLauncher(layout_for())


def test_modules_inside_the_sandbox_import_the_standard_library_only() -> None:
    """They are sent into sandboxes as text, and a zygote must load nothing that a program could find in its memory."""
    code = (
        "import sys; before = set(sys.modules); import tandem.reward.sandbox.inside.zygote\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - before)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0 and set(done.stdout.split()) <= {*sys.stdlib_module_names, "tandem"}


def test_without_isolation_programs_have_limits_and_an_empty_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TEST_SECRET", SECRET)
    (tmp_path / "kept").write_text("x")
    with closing(BareLauncher(layout_for()).open(seccomp=filter_program.available())) as sandbox:
        sandbox.await_ready(60.0)
        go = partial(sandbox.run, "script", limits=LIMITS)
        folder = said(go(["", "import os\nprint(os.getcwd())"]))
        assert SECRET not in said(go(["", "import os\nprint(os.environ)"]))
        assert go(["", "x = bytearray(600 << 20)"]).failure == "memory"
        short = Limits(cpu_seconds=0.5, wall_seconds=5.0)
        assert sandbox.run("script", ["", "while True: pass"], short).failure == "time"
        assert go(["", "import os\nwhile True: os.write(1, b'x' * 1000)"]).failure == "output"
        said(go(["", f"import os\nos.symlink({str(tmp_path)!r}, 'link')"]))
        assert alive(sandbox)
    assert not Path(folder).exists() and (tmp_path / "kept").exists(), "a link in the working folder is not followed"
    with closing(BareLauncher(layout_for()).open(seccomp=False)) as sandbox:
        sandbox.await_ready(60.0)
        assert sandbox.run("script", ["", DAEMON.format(folder=str(tmp_path))], LIMITS).exit_code == 0
        daemon = int((tmp_path / "beat").read_text())
        settles(lambda: not psutil.pid_exists(daemon), "a daemon survived its run")
