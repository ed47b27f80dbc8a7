"""Temporary folders are removed with their owners, however these end, and nobody else's are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tandem.protos.errors import EnvironmentLackError
from tandem.protos.scratch_folder import ScratchFolder, sweep
from tandem.rollout.vllm.engine_folder import EngineFolder, name_shared_memory, sweep_engine_folders
from tests.support.paths import ROOT
from tests.support.processes import wait_until_gone

OWNER = """
import os, sys, time
from tandem.protos.scratch_folder import ScratchFolder
folder = ScratchFolder("test")
(folder.path / "left").write_text("behind")
child = os.fork()
if child == 0:
    time.sleep(600)
print(folder.path, child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder for this process with a path short enough for sockets."""
    tmp_path_factory.getbasetemp()  # fixes pytest's base folder before the environment changes
    with tempfile.TemporaryDirectory(prefix="place-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_folder_is_private_and_removed_when_closed(place: Path) -> None:
    folder = ScratchFolder("test")
    assert folder.path.parent == place and folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "full").mkdir()
    sweep("test")
    assert folder.path.exists(), "its owner lives"
    folder.close()
    assert not list(place.iterdir())
    folder.close()


def test_a_killed_owners_folder_is_removed_after_its_last_fork_ends(place: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder, _, child = owner.stdout.readline().rpartition(" ")
        owner.kill()
    try:
        sweep("test")
        assert Path(folder, "left").exists(), "a fork may use it"
    finally:
        os.kill(int(child), signal.SIGKILL)
    wait_until_gone(int(child))
    sweep("other")
    assert Path(folder).exists()
    with ScratchFolder("test"):
        assert not Path(folder).exists()
    assert not list(place.iterdir())


def test_only_folders_of_this_user_are_removed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    (place / "tandem-test-link").symlink_to(tmp_path)
    (place / "tandem-test-file").touch()
    if os.geteuid() == 0:
        (place / "tandem-test-others").mkdir()
        os.chown(place / "tandem-test-others", 4711, 4711)
    before = sorted(place.iterdir())
    sweep("test")
    assert sorted(place.iterdir()) == before and (tmp_path / "precious").exists()


def test_a_path_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = EngineFolder()
    try:
        assert folder.path.parent == Path("/tmp") and not list(long.iterdir())
        assert len(os.fsencode(folder.path)) + len(f"/{uuid.uuid4()}") <= 107
    finally:
        folder.close()
    with pytest.raises(EnvironmentLackError, match="set TMPDIR"):
        ScratchFolder("test", longest_path=10)


def test_only_children_of_an_engine_use_its_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in processes that compile
    monkeypatch.delenv("TMPDIR", raising=False)
    before = dict(os.environ)
    folder = EngineFolder()
    with folder.given_to_children():
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == os.environ["VLLM_RPC_BASE_PATH"] == str(folder.path)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == place, "what was compiled is kept"
    assert dict(os.environ) == before and tempfile.gettempdir() == str(place)
    folder.close()


def test_only_shared_memory_of_a_killed_engine_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meeting(folder: Path) -> Path:
        """A rendezvous file of the workers, and the shared memory named after it."""
        name = f"vllm_dist_{uuid.uuid4().hex}"
        (folder / name).touch()
        segment = Path("/dev/shm") / f"{name}-tp:0-[0-1]-cpushm_0"
        segment.touch()
        return segment

    def named(folder: Path) -> Path:
        """Shared memory as a process of this engine would create it."""
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        name_shared_memory()
        segment = SharedMemory(create=True, size=1)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        segment.close()
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        return Path("/dev/shm") / segment.name

    usual: str = shared_memory._SHM_NAME_PREFIX  # type: ignore[attr-defined]
    name_shared_memory()
    assert shared_memory._SHM_NAME_PREFIX == usual, "this is no engine's process"  # type: ignore[attr-defined]
    monkeypatch.setattr(shared_memory, "_SHM_NAME_PREFIX", usual)  # set here so that monkeypatch restores it
    killed = place / f"tandem-vllm-{uuid.uuid4().hex[:8]}"
    killed.mkdir()
    folder = EngineFolder()  # removes the killed engine's folder
    assert not killed.exists()
    killed.mkdir()
    ownerless, living = [meeting(killed), named(killed)], [meeting(folder.path), named(folder.path)]
    try:
        assert all(segment.exists() for segment in [*ownerless, *living])
        sweep_engine_folders()
        assert not killed.exists() and not any(segment.exists() for segment in ownerless)
        assert all(segment.exists() for segment in living)
        folder.close()
        assert not any(segment.exists() for segment in living)
    finally:
        for segment in [*ownerless, *living]:
            segment.unlink(missing_ok=True)
