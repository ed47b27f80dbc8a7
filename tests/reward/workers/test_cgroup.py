"""The cgroup of workers, on the machine's cgroup2 file system. Needs root, which may make and delegate cgroups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.reward.config import LimitsConfig, RewardConfig
from tandem.reward.workers.cgroup import SERVICES, delegated, limits_of, workers_cgroup
from tests.support.made_up_cgroup import made_up_cgroup
from tests.support.waiting import eventually

LIMITS = {"pids": {"pids.max": 12}, "hugetlb": {"hugetlb.2MB.max": 0}}
"""By controller, a limit that a small program does not need."""

# Enters the delegated cgroup like a service that systemd started there, and starts a worker in one of its own.
SERVICE = """
import json, os, subprocess, sys
from pathlib import Path
from tandem.reward.workers.cgroup import workers_cgroup
folder, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
(folder / "cgroup.procs").write_text(str(os.getpid()))
with workers_cgroup(limits) as made:
    worker = subprocess.Popen([sys.executable, "-c", sys.argv[3]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (made / "cgroup.procs").write_text(str(worker.pid))
    worker.stdin.write(b"go\\n")
    worker.stdin.flush()
    said = worker.stdout.readline().decode()
    print(json.dumps({
        "made": made.name,
        "members": [int(pid) for pid in (made / "cgroup.procs").read_text().split()],
        "worker": worker.pid,
        "own": Path("/proc/self/cgroup").read_text(),
        "limits": {file: int((made / file).read_text()) for file in limits},
        "said": said.strip(),
    }), flush=True)
print(worker.wait(timeout=10), flush=True)
"""
WORKER = """
import subprocess, sys, time
input()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
FORK_BOMB = """
import os, time
input()
children = 0
try:
    while children < 100:
        if os.fork() == 0:
            time.sleep(600)
        children += 1
except OSError:
    pass
print(children, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A delegated cgroup without processes."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    mount = next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
    if mount is None or not os.access(mount, os.W_OK):
        pytest.skip("needs a cgroup2 file system that this user may write to")
    switches = mount / "cgroup.subtree_control"
    off = set(LIMITS) & set((mount / "cgroup.controllers").read_text().split()) - set(switches.read_text().split())
    switches.write_text(" ".join(f"+{name}" for name in off))
    folder = mount / f"tandem-test-{os.getpid()}"
    folder.mkdir()
    try:
        os.setxattr(folder, "user.delegate", b"1")
        yield folder
    finally:
        for left in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            left.rmdir()
        folder.rmdir()
        switches.write_text(" ".join(f"-{name}" for name in off))


def service_in(folder: Path, limits: dict[str, int], worker: str) -> dict[str, object]:
    """What a service in this cgroup reports of its worker, and the worker's exit code as `exit_code`."""
    command = [sys.executable, "-c", SERVICE, str(folder), json.dumps(limits), worker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report, exit_code = done.stdout.splitlines()
    return {**json.loads(report), "exit_code": int(exit_code)}


def test_workers_get_a_cgroup_with_limits_that_ends_with_the_service_and_all_in_it(folder: Path) -> None:
    controllers = (folder / "cgroup.controllers").read_text().split()
    limits = next((LIMITS[name] for name in controllers if name in LIMITS), None)
    if limits is None:
        pytest.skip(f"this host's cgroup2 has none of the controllers {', '.join(LIMITS)}")
    found = service_in(folder, limits, WORKER)
    members = found["members"]
    assert isinstance(members, list) and found["worker"] in members and len(members) == 2
    assert found["limits"] == limits
    assert f"0::/{folder.name}/{SERVICES}\n" in str(found["own"]), "the service itself is beside its workers"
    assert found["exit_code"] == -9
    assert not (folder / str(found["made"])).exists()
    eventually(lambda: not (folder / SERVICES / "cgroup.procs").read_text())


def test_the_number_of_processes_is_bounded(folder: Path) -> None:
    if "pids" not in (folder / "cgroup.controllers").read_text().split():
        pytest.skip("this host's cgroup2 does not control the number of processes")
    assert service_in(folder, LIMITS["pids"], FORK_BOMB)["said"] == str(LIMITS["pids"]["pids.max"] - 1)


def test_a_cgroup_that_was_not_delegated_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mounts").symlink_to("/proc/self/mounts")
    (tmp_path / "cgroup").write_text(f"0::/{folder.name}\n")
    assert delegated(frozenset(), tmp_path) == folder
    assert delegated(frozenset({"no-such-controller"}), tmp_path) is None
    os.removexattr(folder, "user.delegate")
    assert delegated(frozenset(), tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert delegated(frozenset(), tmp_path) is None, "the host's root"


def test_memory_and_processes_of_all_workers_are_bounded_and_killed_at_the_end(tmp_path: Path) -> None:
    """In a made-up cgroup: a kernel that counts memory elsewhere (version 1) takes no such limit."""
    limits = limits_of(RewardConfig(num_workers=2))
    made_up = made_up_cgroup(tmp_path, "memory pids")
    with workers_cgroup(limits, made_up.proc) as made:
        assert made is not None and made.parent == made_up.folder
        assert {file.name: int(file.read_text()) for file in made.iterdir()} == limits
        assert set((made_up.folder / "cgroup.subtree_control").read_text().split()) == {"+memory", "+pids"}
        assert (made_up.folder / SERVICES).is_dir()
    assert (made / "cgroup.kill").read_text() == "1"


def test_without_a_controller_of_memory_nothing_is_made(tmp_path: Path) -> None:
    made_up = made_up_cgroup(tmp_path, "cpu pids")
    before = set(made_up.folder.iterdir())
    with workers_cgroup(limits_of(RewardConfig()), made_up.proc) as made:
        assert made is None and set(made_up.folder.iterdir()) == before


def test_the_limits_follow_from_the_configuration() -> None:
    config = RewardConfig(num_workers=3, limits=LimitsConfig(memory_bytes=2 << 30, processes=7))
    assert limits_of(config) == {"memory.max": 7 << 30, "pids.max": 3 * 8 * 64}
