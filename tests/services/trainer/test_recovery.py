"""A trainer that dies at any moment: its successor reaches the same weights and trains no group twice."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.codec import EncodedGroups
from tandem.protos.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    LedgerError,
    LostWritesError,
    RunExistsError,
    RunFolderError,
)
from tandem.protos.types import TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.process import Repeated
from tandem.services.trainer import prefetch, recovery
from tandem.services.trainer.batch_source import BatchSource
from tandem.services.trainer.notes import read_notes
from tandem.services.trainer.rank_zero import RankZero
from tandem.services.trainer.recovery import (
    check_complete,
    check_no_trainer_works,
    check_world_size,
    find_resume_point,
    read_records,
    trainer_lock,
)
from tandem.trainer.batch.prepared import PreparedBatch
from tandem.trainer.batch.record import read_plan, record_folder, recorded_versions, write_record
from tandem.trainer.learner import Learner
from tandem.trainer.weight_sender import WeightSender
from tests.support.redis_ring import SAMPLER, SCORER, losing_writes
from tests.support.trainer_ring import P, different_rewards, lines_of, make_recipe, make_run, put_scored, train
from tests.support.training_groups import make_batch, make_group, make_payloads, write_states
from tests.support.waiting import eventually

TOTAL = 4


class Crash(Exception):
    """Stands for the end of the process; the trainer catches it nowhere."""


def prepared(folder: Path, url: str) -> tuple[Recipe, Buffer]:
    """A run whose groups are all scored and waiting; it saves a checkpoint every second batch."""
    recipe = make_recipe(folder, trainer={"checkpoint_every": 2})
    buffer = make_run(url, recipe)
    put_scored(buffer, different_rewards(TOTAL * P))
    return recipe, buffer


def exported(recipe: Recipe) -> bytes:
    return (recipe.folder / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[dict[int, str], bytes]:
    """Digests of the weights by version, and the exported file, of a run without a crash."""
    recipe, _ = prepared(tmp_path_factory.mktemp("undisturbed"), redis_url)
    assert train(recipe, redis_url)
    return {line["step"]: line["weights_digest"] for line in lines_of(recipe)}, exported(recipe)


def crash_at(patched: pytest.MonkeyPatch, owner: Any, name: str, when: str, nth: int) -> None:
    """Crashes in the function's nth call from now on, before or after its work."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        due = next(calls) == nth
        if due and when == "before":
            raise Crash
        result = original(*args, **kwargs)
        if due:
            raise Crash
        return result

    patched.setattr(owner, name, stand_in)


@pytest.mark.parametrize(
    ("owner", "name", "when", "nth"),
    [
        (prefetch, "write_record", "before", 3),
        (prefetch, "write_record", "after", 3),
        (Buffer, "record", "before", 3),
        (Buffer, "record", "after", 3),
        (Learner, "prepare", "after", 3),
        (Learner, "train", "after", 3),
        (WeightSender, "snapshot", "before", 3),
        (WeightSender, "snapshot", "after", 3),
        (Buffer, "publish", "after", 4),  # the first call publishes version 0
        (RankZero, "write_line", "after", 2),
        (Learner, "save", "after", 1),
        (Buffer, "commit", "after", 2),
        (Learner, "export", "before", 1),
        (Buffer, "drop_outstanding", "after", 1),
    ],
)
def test_a_crash_at_any_moment_changes_nothing(
    tmp_path: Path,
    redis_url: str,
    undisturbed: tuple[dict[int, str], bytes],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    when: str,
    nth: int,
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    with monkeypatch.context() as patched:
        crash_at(patched, owner, name, when, nth)
        with pytest.raises(Crash):
            train(recipe, redis_url)
    check_resumed(recipe, buffer, redis_url, undisturbed)


def check_resumed(recipe: Recipe, buffer: Buffer, url: str, undisturbed: tuple[dict[int, str], bytes]) -> None:
    """Checks that a successor ends the run with the weights of an undisturbed one, and trains no group twice."""
    assert train(recipe, url)
    digests, weights = undisturbed
    lines = lines_of(recipe)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["weights_digest"] == digests[line["step"]] for line in lines), "also of those trained again"
    assert exported(recipe) == weights
    assert recorded_versions(recipe.folder) == [1, 2, 3, 4]
    for version in recorded_versions(recipe.folder):
        notes = read_notes(recipe.folder, version)
        assert set(notes) == set(read_plan(recipe.folder, version).group_ids), "a commit removes them from Redis"
        assert {lease.worker for one in notes.values() for lease in one.leases.values()} == {SAMPLER, SCORER}
    counts = buffer.counts()
    assert (counts["committed"], counts["admitted"], counts["outstanding"]) == (TOTAL * P, TOTAL * P, 0)
    assert buffer.verify() == []
    assert json.loads((recipe.folder / "summary.json").read_text())["set_aside"] == {}


@pytest.mark.parametrize("name", ["claim_scored", "record"])
def test_a_redis_that_forgets_what_the_trainer_did_ends_it_and_its_successor_changes_nothing(
    tmp_path: Path,
    redis_url: str,
    undisturbed: tuple[dict[int, str], bytes],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    original, calls = getattr(Buffer, name), itertools.count(1)

    def forgotten(self: Buffer, *args: Any) -> Any:
        if next(calls) != 3:
            return original(self, *args)
        with losing_writes(buffer):
            return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Buffer, name, forgotten)
        with pytest.raises(LostWritesError):
            train(recipe, redis_url)
    check_resumed(recipe, buffer, redis_url, undisturbed)


def test_a_crash_after_the_next_batch_is_on_disk_changes_nothing(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    with monkeypatch.context() as patched:
        when_trained(patched, 3, lambda: eventually(lambda: 4 in recorded_versions(recipe.folder)), crashes=True)
        with pytest.raises(Crash):
            train(recipe, redis_url)
    counts = buffer.counts()
    assert recorded_versions(recipe.folder) == [1, 2, 3, 4]
    assert (counts["trained"], counts["scored_claimed"]) == (P, P), "the ledger has only version 3 as recorded"
    check_resumed(recipe, buffer, redis_url, undisturbed)


def test_a_crash_while_a_version_is_published_and_the_next_one_trains_changes_nothing(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    next_one_trains = threading.Event()
    original = Buffer.publish

    def publish(self: Buffer, incarnation: int, version: int, *more: Any) -> None:
        if version == 3:
            assert next_one_trains.wait(60.0)
            raise Crash
        original(self, incarnation, version, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Buffer, "publish", publish)
        when_trained(patched, 4, next_one_trains.set)
        with pytest.raises(Crash):
            train(recipe, redis_url)
    assert buffer.published_version() == 2
    assert buffer.counts()["trained"] == 2 * P, "two versions are recorded and not published"
    check_resumed(recipe, buffer, redis_url, undisturbed)


def test_a_trainer_that_is_stopped_leaves_the_batch_that_it_recorded_ahead_to_its_successor(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    stop = threading.Event()

    def stop_after_record() -> None:
        eventually(lambda: 2 in recorded_versions(recipe.folder))
        stop.set()

    with monkeypatch.context() as patched:
        when_trained(patched, 1, stop_after_record)
        assert not train(recipe, redis_url, stop)
    assert recorded_versions(recipe.folder) == [1, 2]
    assert buffer.published_version() == 1 == len(lines_of(recipe)), "the version that was trained is published"
    check_resumed(recipe, buffer, redis_url, undisturbed)


def when_trained(
    patched: pytest.MonkeyPatch, version: int, action: Callable[[], object], *, crashes: bool = False
) -> None:
    """Does the action before the first step of a version, and crashes there if asked to."""
    original = Learner.train

    def stand_in(self: Learner, prepared: PreparedBatch, *args: Any, **kwargs: Any) -> Any:
        if prepared.batch.policy_version == version:
            action()
            if crashes:
                raise Crash
        return original(self, prepared, *args, **kwargs)

    patched.setattr(Learner, "train", stand_in)


def test_without_a_checkpoint_everything_recorded_is_trained_again_and_published_once(
    tmp_path: Path, redis_url: str, undisturbed: tuple[dict[int, str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = prepared(tmp_path, redis_url)
    with monkeypatch.context() as patched:
        crash_at(patched, Learner, "train", "before", 4)
        with pytest.raises(Crash):
            train(recipe, redis_url)
    shutil.rmtree(recipe.folder / "checkpoints")
    # The ledger has versions 1 and 2 as committed, but the disk decides.
    published: list[int] = []
    original = Buffer.publish

    def publish(self: Buffer, incarnation: int, version: int, *more: Any) -> None:
        published.append(version)
        original(self, incarnation, version, *more)

    monkeypatch.setattr(Buffer, "publish", publish)
    assert train(recipe, redis_url)
    assert published == [4], "version 4 was recorded, too; nothing is left to train afresh"
    assert [bool(line.get("replayed")) for line in lines_of(recipe)] == [True] * 4
    assert exported(recipe) == undisturbed[1]


def test_a_replaced_trainer_takes_no_step(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, buffer = prepared(tmp_path, redis_url)
    original = BatchSource.poll

    def poll(self: BatchSource, *args: Any) -> TrainBatch | None:
        batch = original(self, *args)
        buffer.begin_incarnation()
        return batch

    steps: list[int] = []
    monkeypatch.setattr(BatchSource, "poll", poll)
    monkeypatch.setattr(Learner, "train", lambda self, batch, *_, **__: steps.append(batch.policy_version))
    with pytest.raises(FencedError):
        train(recipe, redis_url)
    assert steps == []
    assert recorded_versions(recipe.folder) == []


@pytest.mark.parametrize("steps", ["optimizer_steps_per_batch", "epochs_per_batch"])
def test_a_trainer_replaced_within_a_batch_does_not_take_its_second_step(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    recipe = make_recipe(tmp_path, trainer={steps: 2})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(TOTAL * P))
    original = RankZero.check
    checks = itertools.count(1)

    def check(self: RankZero) -> None:
        if next(checks) == 2:  # before the first step and before the second step
            buffer.begin_incarnation()
        original(self)

    monkeypatch.setattr(RankZero, "check", check)
    with pytest.raises(FencedError):
        train(recipe, redis_url)
    assert next(checks) == 3
    assert buffer.published_version() == 0


def test_a_gap_between_checkpoint_and_records_is_named(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        batch, groups = make_batch([make_group(version)], policy_version=version)
        write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    assert find_resume_point(tmp_path).recorded == [1, 2, 3]
    assert find_resume_point(tmp_path).last_version == 3
    shutil.rmtree(record_folder(tmp_path, 2))
    with pytest.raises(LedgerError, match="000002 is missing"):
        find_resume_point(tmp_path)


def test_a_start_reads_only_the_plans_of_batches_that_redis_has_not_committed(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds version 4; Redis has committed it, or has lost that, or has lost everything."""
    for version in range(1, 7):
        batch, groups = make_batch([make_group(version)], policy_version=version)
        write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    write_states(tmp_path / "checkpoints", [(4, 1)])
    read: list[int] = []
    monkeypatch.setattr(recovery, "read_plan", lambda *of: read.append(of[1]) or read_plan(*of))
    buffer = make_run(redis_url, make_recipe(tmp_path))
    for committed, expected in ((0, [1, 2, 3, 4, 5, 6]), (4, [5, 6]), (3, [4, 5, 6]), (9, [5, 6])):
        buffer.connection.redis.hset(buffer.connection.key("meta"), "committed_version", committed)
        read.clear()
        buffer.rollback(buffer.begin_incarnation(), 4, read_records(buffer, tmp_path, 4))
        assert read == expected
        counts = buffer.counts()
        assert (counts["committed"], counts["trained"], buffer.committed_version()) == (4, 2, 4)
        assert buffer.verify() == []
    shutil.rmtree(record_folder(tmp_path, 3))
    read_records(buffer, tmp_path, 4)
    buffer.connection.redis.hset(buffer.connection.key("meta"), "committed_version", 1)
    with pytest.raises(LedgerError, match=r"has committed version 1 .* holds version 4, but .*000003 is missing"):
        read_records(buffer, tmp_path, 4)


def test_a_run_whose_folder_lacks_a_batch_does_not_end_with_success(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 1})
    put_scored(make_run(redis_url, recipe), different_rewards(P))
    monkeypatch.setattr(Learner, "export", lambda *_: shutil.rmtree(record_folder(recipe.folder, 1)))
    with pytest.raises(RunFolderError, match=r"batches/000001 is missing at the end of the run"):
        train(recipe, redis_url)
    assert not (recipe.folder / "summary.json").exists()


def test_more_trained_groups_than_the_batches_of_the_folder_can_hold_are_an_error(tmp_path: Path) -> None:
    batch, groups = make_batch([make_group(1)], policy_version=1)
    write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    check_complete({"trained": 2, "committed": 2}, tmp_path, 1, 4)
    with pytest.raises(RunFolderError, match=r"ledger has 5 groups as trained, but the 1 batches in .* hold at most 4"):
        check_complete({"trained": 0, "committed": 5}, tmp_path, 1, 4)


def test_a_batch_planned_for_more_ranks_is_refused() -> None:
    batch, _ = make_batch([make_group(0), make_group(1)], world_size=2)
    check_world_size(batch, 2)
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks=2"):
        check_world_size(batch, 1)


def test_a_second_trainer_is_refused_at_once_beside_one_that_works_but_not_beside_one_that_ends(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_HEARTBEAT_WAIT_SECONDS", 0.5)
    recipe = make_recipe(tmp_path)
    buffer = make_run(redis_url, recipe)
    check_no_trainer_works(recipe, redis_url)  # no trainer was here
    activity = "trains"
    with trainer_lock(recipe.folder):
        check_no_trainer_works(recipe, redis_url)  # its heartbeat is silent: `trainer_lock` waits for it
        with Repeated("heartbeat", 0.02, lambda: assert_(buffer.heartbeat("trainer", {}, activity) == "")):
            with pytest.raises(RunExistsError, match="a trainer works in it; stop that one first"):
                check_no_trainer_works(recipe, redis_url)
            activity = recovery.STOPPING
            eventually(lambda: buffer.activities().get("trainer") == recovery.STOPPING)
            check_no_trainer_works(recipe, redis_url)
    check_no_trainer_works(recipe, redis_url)


def assert_(condition: bool) -> None:
    assert condition


def test_a_folder_has_one_trainer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.trainer.recovery._LOCK_SECONDS", 0.3)
    with trainer_lock(tmp_path), pytest.raises(DeadlineError, match="another trainer"):
        trainer_lock(tmp_path)
    trainer_lock(tmp_path).close()
