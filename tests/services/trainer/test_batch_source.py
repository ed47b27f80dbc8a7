"""Claiming, selection, planning and reading of batches on a real Redis."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group
from tandem.protos.errors import FencedError, LedgerError, ScorerError, SelectionError, UnavailableError
from tandem.protos.types import TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.trainer.batch_source import BatchSource, groups_of_rank, read_groups, rejection
from tandem.trainer.batch.rejected import read_rejected
from tests.support.trainer_ring import different_rewards, make_recipe, make_run, put_scored
from tests.support.training_groups import group_headers, make_group
from tests.support.waiting import eventually


class Run:
    """A run and its batch source, as on rank 0."""

    def __init__(
        self, folder: Path, url: str, world_size: int = 1, *, credits: int = 100, **sections: dict[str, object]
    ) -> None:
        self.recipe: Recipe = make_recipe(folder, **sections)
        self.buffer: Buffer = make_run(url, self.recipe, credits=credits)
        self.stop = threading.Event()
        self.world_size = world_size

    def source(self) -> BatchSource:
        incarnation = self.buffer.begin_incarnation()
        return BatchSource(self.buffer, self.recipe, incarnation, self.world_size, self.stop, ("padded",))


def test_groups_become_batches_in_order_of_completion(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url)
    groups = different_rewards(5)
    put_scored(run.buffer, [groups[3], groups[0], groups[4], groups[1], groups[2]])
    source = run.source()
    first, second = source.poll(0, 1.0), source.poll(1, 1.0)
    assert first and second
    assert (first.group_ids, second.group_ids) == (("0-3", "0-0"), ("0-4", "0-1"))
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert len(first.plan) == 8, "every scored row of both groups is planned"
    assert source.poll(2, 0.05) is None, "one group is not a batch"
    assert len(source.survivors) == 1
    put_scored(run.buffer, different_rewards(1, start=5))
    with pytest.raises(FencedError):
        source.poll(2, 1.0)  # `put_scored` started a newer incarnation


def test_a_rejected_group_returns_its_credit_before_the_batch_is_full(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url, credits=1, trainer={"selection": {"drop_zero_variance": True}})
    dull = [make_group(index, rewards=(1.0,) * 4) for index in range(3)]
    put_scored(run.buffer, [*dull, *different_rewards(1, start=3)])
    assert run.buffer.admission().free == 0
    source = run.source()
    eventually(lambda: source.poll(0, 0.05) is None and run.buffer.admission().free == 3)
    assert run.buffer.counts()["dropped:zero_variance"] == 3
    assert source.take_rejections() | {"rejected_response_length_mean": 0} == {
        "rejected_groups": 3,
        "rejected_zero_variance": 3,
        "rejected_response_length_mean": 0,
    }
    assert source.take_rejections() == {"rejected_groups": 0}
    kept = [(reason, decode_group(payload).group_id) for reason, payload in read_rejected(run.recipe.folder, 1)]
    assert kept == [("zero_variance", "0-0"), ("zero_variance", "0-1")], "as many as the batch has groups"


def test_too_many_rejections_in_a_row_end_the_run_with_the_counts(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url, trainer={"selection": {"drop_zero_variance": True}, "max_consecutive_rejections": 4})
    put_scored(run.buffer, [make_group(index, rewards=(0.0,) * 4) for index in range(4)])
    with pytest.raises(SelectionError, match=r"4 groups in a row.*dropped:zero_variance': 4"):
        run.source().poll(0, 1.0)


def test_a_group_of_a_version_that_does_not_exist_is_dropped_and_replaced(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url, trainer={"max_consecutive_rejections": 2})
    lie = different_rewards(1, versions=(7,))
    put_scored(run.buffer, [*lie, *different_rewards(2, start=1)])
    source = run.source()
    batch = source.poll(0, 1.0)
    assert batch is not None and batch.group_ids == ("0-1", "0-2")
    assert source.take_rejections()["rejected_unknown_version"] == 1
    counts = run.buffer.counts()
    assert (counts["dropped:unknown_version"], counts["outstanding"]) == (1, 2)
    assert run.buffer.verify() == []
    put_scored(run.buffer, different_rewards(2, start=3, versions=(7,)))
    with pytest.raises(SelectionError, match="samplers stamp versions that were never published"):
        run.source().poll(1, 1.0)


def test_too_many_drops_in_a_row_end_the_run_with_the_scorers_error(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url, run={"max_consecutive_drops": 3})
    drop(run.buffer, 2, start=0)
    assert run.source().poll(0, 0.05) is None, "two drops in a row are fewer than three"
    drop(run.buffer, 1, start=2)
    with pytest.raises(ScorerError, match=r"3 groups in a row were dropped \(crashed: ValueError: of 0-[01]\).*exact"):
        run.source().poll(0, 1.0)


def test_a_scored_group_resets_the_count_of_drops(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url, run={"max_consecutive_drops": 3})
    drop(run.buffer, 2, start=0)
    put_scored(run.buffer, different_rewards(1, start=2))
    drop(run.buffer, 2, start=3)
    assert run.buffer.counts()["consecutive_drops"] == 2
    assert run.source().poll(0, 0.05) is None


def drop(buffer: Buffer, count: int, *, start: int) -> None:
    """Admits groups and drops them, as the reward service does when its scorer raises."""
    group_ids = [f"0-{index}" for index in range(start, start + count)]
    assert buffer.admit([(group_id, b"prompt") for group_id in group_ids], start + count) == count
    buffer.register_sampler("dropping", "127.0.0.1:1", 1)
    buffer.publish(buffer.begin_incarnation(), max(0, buffer.published_version()), ["dropping"])
    dropped = 0
    while dropped < count:
        for claim in buffer.claim("prompts", "dropping", count, 60.0, 1.0):
            dropped += buffer.release(claim, "crashed", "data", f"ValueError: of {claim.group_id}") == "dropped"


SELECTIVE: dict[str, Any] = {"selection": {"drop_zero_variance": True}}


def test_each_selection_rule_rejects_with_its_reason(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, run={"hard_staleness_cap": 3}, trainer=SELECTIVE)

    def reason(**group: Any) -> str | None:
        return rejection(recipe, group_headers(make_group(0, **group)), 4, 1)

    mixed = (0.0, 1.0, 0.0, 1.0)
    assert reason(rewards=mixed, versions=(1, 4)) is None
    assert reason(rewards=mixed, versions=(0, 4)) == "stale", "the oldest token counts"
    assert reason(rewards=(1.0, None, None, None), versions=(4,)) == "too_few_scored_rows"
    assert reason(rewards=(1.0, 1.0, None, None), versions=(4,)) == "zero_variance"
    assert reason(rewards=mixed, versions=(4, 5)) == "unknown_version", "version 5 does not exist yet"
    assert reason(rewards=mixed, versions=(-1,)) == "unknown_version", "weights that no trainer has sent"
    assert reason(rewards=mixed, versions=()) == "unknown_version"
    of_incarnation_1 = group_headers(make_group(0, rewards=mixed, versions=(4,)))
    assert rejection(recipe, of_incarnation_1, 4, 0) == "unknown_version", "an incarnation that has not begun"
    assert reason(rewards=(1.0, 1.0, 1.0, 1.0), versions=(4,), baseline=True) == "zero_variance", (
        "a baseline is no row to train"
    )
    assert rejection(make_recipe(tmp_path), group_headers(make_group(0, rewards=(1.0,) * 4)), 1000, 1) is None


def test_total_rewards_are_compared_whichever_tokens_earned_them(tmp_path: Path) -> None:
    """Dynamic sampling compares each answer's total reward, token rewards included."""
    recipe = make_recipe(tmp_path, trainer=SELECTIVE)

    def reason(*rewards: float) -> str | None:
        group = make_group(0, num_samples=2, rewards=rewards)
        rows = []
        for number, row in enumerate(group.scored_rows):
            earned = [np.zeros(len(one.ids), np.float32) for one in row.trajectory.segments]
            earned[0][np.flatnonzero(row.trajectory.segments[0].loss_mask)[0]] = number
            rows.append(replace(row, trajectory=replace(row.trajectory, token_rewards=tuple(earned))))
        return rejection(recipe, group_headers(replace(group, rows=tuple(rows))), 4, 1)

    assert reason(1.0, 1.0) == "zero_variance"
    assert reason(0.0, 1.0) is None


def test_selection_rules_with_a_greedy_baseline(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, trainer={"advantage": "remax", **SELECTIVE})

    def reason(greedy: float | None, rewards: tuple[float | None, ...], num_segments: int = 1) -> str | None:
        given = (*rewards, greedy)
        made = make_group(0, num_samples=len(rewards), rewards=given, baseline=True, num_segments=num_segments)
        return rejection(recipe, group_headers(made), 4, 1)

    assert reason(1.0, (0.0, 1.0), num_segments=2) is None
    assert reason(None, (0.0, 1.0)) == "no_scored_baseline"
    assert rejection(recipe, group_headers(make_group(0)), 4, 1) == "no_scored_baseline", "sampled without one"
    assert reason(1.0, (None, None)) == "too_few_scored_rows", "a baseline is no row to train"
    assert reason(1.0, (1.0, 1.0)) == "zero_variance"
    assert reason(0.0, (0.0,)) == "zero_variance", "as good as the greedy answer"
    assert reason(0.0, (1.0, 1.0)) is None and reason(0.0, (1.0,)) is None, "better than it"


def test_a_group_without_its_greedy_answer_never_reaches_the_batch(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url, trainer={"advantage": "remax"})
    compared = [make_group(index, rewards=(0.0, 1.0, 1.0, 0.0, 1.0), baseline=True) for index in (1, 3)]
    alone = different_rewards(1) + different_rewards(1, start=2)
    put_scored(run.buffer, [alone[0], compared[0], alone[1], compared[1]])
    batch = run.source().poll(0, 1.0)
    assert batch is not None and batch.group_ids == ("0-1", "0-3")
    assert {row.trajectory_id for row in batch.plan} == {0, 1, 2, 3}, "the greedy answer is not trained"
    assert run.buffer.counts()["dropped:no_scored_baseline"] == 2


def test_the_last_batch_may_be_smaller_and_ends_the_source(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url)
    put_scored(run.buffer, different_rewards(3))
    run.buffer.mark_exhausted("dataset")
    source = run.source()
    first, last = source.poll(0, 5.0), source.poll(1, 5.0)
    assert first and last
    assert last.group_ids == ("0-2",)
    assert source.poll(2, 5.0) is None
    assert source.exhausted


def test_a_stop_ends_the_wait(tmp_path: Path, redis_url: str) -> None:
    run = Run(tmp_path, redis_url)
    source = run.source()
    run.stop.set()
    assert source.poll(0, 60.0) is None
    assert not source.exhausted


class Rank:
    """A rank whose peers vote as scripted."""

    def __init__(self, rank: int, *others: bool) -> None:
        self.rank = rank
        self.others = list(others)
        self.votes: list[bool] = []

    def all_agree(self, ok: bool) -> bool:
        self.votes.append(ok)
        return ok and self.others.pop(0)


def two_ranks(run: Run) -> TrainBatch:
    put_scored(run.buffer, different_rewards(2))
    batch = run.source().poll(0, 1.0)
    assert batch is not None
    assert {row.rank for row in batch.plan} == {0, 1}
    return batch


def test_ranks_read_their_own_rows_and_agree(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.trainer.batch_source._RETRY_SECONDS", 0.01)
    run = Run(tmp_path, redis_url, world_size=2)
    batch = two_ranks(run)
    assert groups_of_rank(batch, 0) == ["0-0", "0-1"], "rank 0 writes the record"
    rank = Rank(1, True)
    groups = read_groups(run.buffer, batch, rank)
    assert set(groups) == {row.group_id for row in batch.plan if row.rank == 1}
    assert all(group.group_id == group_id for group_id, group in groups.items())
    retried = Rank(0, False, True)
    assert set(read_groups(run.buffer, batch, retried)) == {"0-0", "0-1"}
    with pytest.raises(UnavailableError, match="another rank failed"):
        read_groups(run.buffer, batch, Rank(0, False, False))


def test_a_missing_payload_fails_on_every_rank(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.trainer.batch_source._RETRY_SECONDS", 0.01)
    run = Run(tmp_path, redis_url)
    put_scored(run.buffer, different_rewards(2))
    source = run.source()
    batch = source.poll(0, 1.0)
    assert batch is not None
    run.buffer.record(batch.incarnation, 1, batch.group_ids)
    with pytest.raises(LedgerError):
        run.buffer.read(batch.group_ids)
    rank = Rank(0, True, True)
    with pytest.raises(UnavailableError, match="no payload of group 0-0"):
        read_groups(run.buffer, batch, rank)
    assert rank.votes == [False, False]
