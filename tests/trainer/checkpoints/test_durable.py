"""Files, folders and checkpoints appear whole or not at all, and are on disk before anybody relies on them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.protos.codec import EncodedGroups
from tandem.protos.errors import EnvironmentLackError
from tandem.services.run.folder import write_text
from tandem.trainer.batch.record import write_advantages, write_record
from tandem.trainer.batch.rejected import write_rejected
from tandem.trainer.checkpoints import durable
from tandem.trainer.checkpoints.durable import atomic_folder
from tandem.trainer.checkpoints.state import latest_checkpoint, list_checkpoints, prune_checkpoints
from tests.support.training_groups import make_batch, make_group, make_payloads, write_states


def test_a_folder_replaces_the_previous_one(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with atomic_folder(tmp_path / "new") as begun:
            (begun / text).touch()
    assert os.listdir(tmp_path) == ["new"] and os.listdir(tmp_path / "new") == ["two"]


def test_an_exception_keeps_the_previous_folder(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "new"):
        raise RuntimeError("a bug")
    assert os.listdir(tmp_path) == ["new"]


def test_a_file_at_the_target_path_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("mine")
    refused = pytest.raises(EnvironmentLackError, match="new: a file stands where a folder is needed")
    with refused, atomic_folder(tmp_path / "new"):
        pytest.fail("it was begun")
    assert os.listdir(tmp_path) == ["new"] and (tmp_path / "new").read_text() == "mine"


class Crash(BaseException):
    """Stands for the end of the process, or of the power."""


def write_old(folder: Path) -> None:
    with atomic_folder(folder / "export") as begun:
        (begun / "weights").write_text("old")
    write_text(folder / "config.json", "old")


def write_new(folder: Path) -> None:
    with atomic_folder(folder / "export") as begun:
        (begun / "weights").write_text("new")
    write_text(folder / "config.json", "new")


@pytest.mark.parametrize("owner_and_name", [(Path, "rename"), (Path, "replace"), (durable, "_exchange"), (os, "fsync")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner_and_name: tuple[object, str], when: str
) -> None:
    owner, name = owner_and_name
    original = getattr(owner, name)
    write_old(tmp_path)
    for nth in itertools.count(1):
        calls = itertools.count(1)

        def crash(*arguments: object) -> object:
            due = next(calls) == nth  # noqa: B023
            if due and when == "before":
                raise Crash
            result = original(*arguments)
            if due:
                raise Crash
            return result

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, crash)
            with contextlib.suppress(Crash):
                write_new(tmp_path)
        for file in (tmp_path / "export" / "weights", tmp_path / "config.json"):
            assert file.read_text() in ("old", "new")
        if next(calls) <= nth:
            break
    write_new(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "export"]


def test_whatever_is_renamed_is_on_disk_before_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, groups = make_batch([make_group(0)], policy_version=3)
    done: list[tuple[str, str]] = []

    def noted(what: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(path: Path, *target: Path) -> object:
            done.append((what, (target[0] if target else path).name))
            return original(path, *target)

        return call

    monkeypatch.setattr(durable, "sync", noted("sync", durable.sync))
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, noted("rename", getattr(Path, name)))
    run = tmp_path / "run"
    run.mkdir()
    write_record(run, batch, EncodedGroups.of(make_payloads(groups.values())))
    assert done.index(("sync", "run")) < done.index(("sync", "groups.arrow")), "a new folder of records is synced"
    assert done.index(("sync", "groups.arrow")) < done.index(("rename", "000003")) < len(done) - 1
    assert done[-2:] == [("rename", "000003"), ("sync", "batches")]
    for write, name, folder in (
        (lambda: write_advantages(run, 3, {("0-0", 0): 0.5}), "advantages.json", "000003"),
        (lambda: write_rejected(run, 4, "0-9", "stale", b"payload"), "0-9.stale", "000004"),
        (lambda: write_text(run / "config.json", "{}"), "config.json", "run"),
    ):
        write()
        assert [what for what, _ in done[-3:]] == ["sync", "rename", "sync"]
        assert (done[-2][1], done[-1][1]) == (name, folder)


def test_a_file_system_that_cannot_exchange_folders_replaces_them_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_exchange", lambda *_: False)
    write_old(tmp_path)
    write_new(tmp_path)
    assert (tmp_path / "export" / "weights").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["config.json", "export"]


# ---- checkpoints ----


def test_the_newest_checkpoint_is_that_of_the_last_version_and_then_of_the_last_incarnation(tmp_path: Path) -> None:
    write_states(tmp_path, [(9, 12), (10, 2), (10, 11), (10, 9)])
    (tmp_path / "000011-3").mkdir()
    (tmp_path / "000012-3.partial").mkdir()
    assert [found[:2] for found in list_checkpoints(tmp_path)] == [(9, 12), (10, 2), (10, 9), (10, 11)]
    assert latest_checkpoint(tmp_path) == (10, 11, tmp_path / "000010-11")


def test_a_checkpoint_that_is_half_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_states(tmp_path, [(1, 1), (2, 1), (3, 1)])

    def crash(_folder: Path) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(durable.shutil, "rmtree", crash)
        with pytest.raises(Crash):
            prune_checkpoints(tmp_path, 1)
    assert [version for version, _, _ in list_checkpoints(tmp_path)] == [2, 3]
    prune_checkpoints(tmp_path, 1)
    assert os.listdir(tmp_path) == ["000003-1"]
