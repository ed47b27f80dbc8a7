"""The small disk of a run folder: it gets full, and what was written there stays. Needs root."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.protos.errors import EnvironmentLackError
from tandem.services.chaos import disk as chaos_disk
from tandem.services.chaos.disk import SmallDisk, check_mountable


@pytest.fixture(autouse=True)
def root() -> None:
    try:
        check_mountable()
    except EnvironmentLackError as error:
        pytest.skip(str(error))


@contextmanager
def user_of(folder: Path, uses: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses the folder until it reads a line or is killed."""
    script = f"import mmap, os, sys; {uses}; print(flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_small_disk_is_full_and_free_again_and_leaves_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with SmallDisk(folder, 32 << 20) as disk:
        (folder / "before").write_text("kept")
        disk.fill()
        with pytest.raises(OSError, match="No space left") as caught:
            (folder / "during").write_bytes(b"\0" * (1 << 20))
        assert caught.value.errno == errno.ENOSPC
        disk.free()
        (folder / "after").write_bytes(b"\0" * (8 << 20))
    assert {file.name for file in folder.iterdir()} == {"before", "during", "after"}
    assert (folder / "before").read_text() == "kept" and not os.path.ismount(folder)
    with pytest.raises(EnvironmentLackError, match="is not empty"):
        SmallDisk(folder, 1 << 20)


@pytest.mark.parametrize(
    "uses",
    [
        "os.chdir(sys.argv[1])",
        "file = open(sys.argv[1] + '/held', 'w')",
        "file = open(sys.argv[1] + '/held', 'r+b'); held = mmap.mmap(file.fileno(), 0); file.close()",
    ],
)
def test_a_disk_in_use_stays_and_the_error_names_who_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses: str
) -> None:
    monkeypatch.setattr(chaos_disk, "BUSY_SECONDS", 0.2)
    folder = tmp_path / "run"
    disk = SmallDisk(folder, 1 << 20)
    (folder / "held").write_text("kept")
    try:
        with user_of(folder, uses) as process, pytest.raises(EnvironmentLackError) as caught, disk:
            pass
        said = str(caught.value)
        assert said.startswith(f"{folder} is still mounted (umount: ") and "busy" in said
        assert f"used by the processes {process.pid}; end them" in said and "right" not in said
        subprocess.run(["sh", "-c", said.rpartition(": ")[2]], check=True)  # the remedy is a command
        assert (folder / "held").exists() and os.listdir(tmp_path) == ["run"]
    finally:
        if os.path.ismount(folder):
            subprocess.run(["umount", str(folder)], check=True)


def test_the_disk_waits_for_a_process_that_is_ending(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writes = "print(flush=True); time.sleep(0.5); file.write('all')"
    script = f"import sys, time; file = open(sys.argv[1] + '/late', 'w'); {writes}"
    with SmallDisk(folder, 1 << 20):
        process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"\n"
    assert not os.path.ismount(folder) and (folder / "late").read_text() == "all"
    assert process.wait(10) == 0
    process.stdout.close()


def test_files_that_cannot_be_copied_stay_on_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "run.copy").mkdir()
    try:
        with (
            pytest.raises(EnvironmentLackError, match="is still mounted: its files cannot be copied"),
            SmallDisk(folder, 1 << 20),
        ):
            (folder / "kept").write_text("kept")
        assert (folder / "kept").read_text() == "kept"
    finally:
        subprocess.run(["umount", str(folder)], check=True)
