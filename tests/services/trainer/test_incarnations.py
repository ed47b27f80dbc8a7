"""What one start of the trainer leaves to the next: checkpoints, records and its number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tandem.protos.codec import EncodedGroups
from tandem.protos.errors import EnvironmentLackError, FencedError, LostWritesError, RunFolderError
from tandem.services.buffer.buffer import Buffer
from tandem.services.trainer import recovery
from tandem.services.trainer.recovery import begin_incarnation, highest_incarnation
from tandem.trainer.batch.record import recorded_versions, write_record
from tandem.trainer.checkpoints import files
from tandem.trainer.checkpoints.state import list_checkpoints, read_state
from tests.support.redis_ring import losing_writes
from tests.support.trainer_ring import P, different_rewards, make_recipe, make_run, put_scored, train
from tests.support.training_groups import make_batch, make_group, make_payloads, write_states


def test_a_trainer_that_is_replaced_while_it_saves_leaves_no_checkpoint(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 1})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(P))
    original = files._random_states

    def wake_up_late() -> dict[str, torch.Tensor]:
        buffer.begin_incarnation()
        return original()

    monkeypatch.setattr(files, "_random_states", wake_up_late)
    with pytest.raises(FencedError):
        train(recipe, redis_url)
    assert list((recipe.folder / "checkpoints").iterdir()) == []
    monkeypatch.setattr(files, "_random_states", original)
    assert train(recipe, redis_url), "the successor writes its own"
    ((version, incarnation, folder),) = list_checkpoints(recipe.folder / "checkpoints")
    assert (version, incarnation) == (1, buffer.counts()["incarnation"])
    assert read_state(folder).incarnation == incarnation


def test_the_records_that_redis_needs_if_it_loses_the_last_commit_are_kept(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, run={"keep_batches": 1}, trainer={"checkpoint_every": 2, "keep_checkpoints": 1})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(4 * P))
    original = Buffer.commit

    def commit(self: Buffer, incarnation: int, version: int) -> None:
        if version < 4:
            original(self, incarnation, version)
        else:
            with losing_writes(buffer):
                original(self, incarnation, version)

    with monkeypatch.context() as patched:
        patched.setattr(Buffer, "commit", commit)
        with pytest.raises(LostWritesError):
            train(recipe, redis_url)
    assert (buffer.committed_version(), recorded_versions(recipe.folder)) == (2, [3, 4])
    assert train(recipe, redis_url)
    counts = buffer.counts()
    assert (counts["committed"], counts["outstanding"]) == (4 * P, 0) and buffer.verify() == []


def test_a_trainer_begins_above_every_incarnation_that_the_run_folder_knows(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, run={"total_batches": 1})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(P))
    (state,) = write_states(recipe.folder / "checkpoints", [(0, 41)])
    assert highest_incarnation(recipe.folder) == 41
    assert buffer.begin_incarnation(41) == 42, "a Redis that lost its last writes would begin the second again"
    state.unlink()
    batch, groups = make_batch([make_group(0)], policy_version=1)
    write_record(recipe.folder, replace(batch, incarnation=50), EncodedGroups.of(make_payloads(groups.values())))
    assert highest_incarnation(recipe.folder) == 50
    assert begin_incarnation(buffer, recipe.folder) == highest_incarnation(recipe.folder) == 51
    buffer.delete()
    buffer = make_run(redis_url, recipe)
    assert begin_incarnation(buffer, recipe.folder) == 52, "samplers may have weights of 51, which wrote nothing else"
    with monkeypatch.context() as full:
        full.setattr(recovery, "write_text", Mock(side_effect=EnvironmentLackError("the disk is full")))
        with pytest.raises(EnvironmentLackError):
            begin_incarnation(buffer, recipe.folder)
    assert buffer.counts()["incarnation"] == 52, "who cannot write its number fences nobody"
    (recipe.folder / "incarnation").write_text("a\x1b]0;b")
    with pytest.raises(RunFolderError, match=r"incarnation holds 'a\\x1b]0;b' instead of a number"):
        begin_incarnation(buffer, recipe.folder)
