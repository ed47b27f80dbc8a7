"""The reward service against a real Redis: rewards are added, failures keep their reason, no group is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.types import ScoredTrajectory, Trajectory
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.buffer.buffer import Buffer
from tandem.services.reward.service import Progress, ScoringWorker, scored_row, unscored_rows_required
from tests.services.reward.conftest import answers, collect, generate, rewards, run_of, trajectory
from tests.support.redis_ring import claim
from tests.support.reward_server import ScriptedCore
from tests.support.waiting import eventually, looping


@contextmanager
def scoring(buffer: Buffer, core: ScoringCore, **config: Any) -> Iterator[ScoringWorker]:
    worker = ScoringWorker(buffer, core, RewardConfig(**config))
    with looping(worker.run):
        yield worker


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    """A run whose groups add up after the test."""
    made = run_of(redis_url)
    yield made
    assert made.verify() == []


def test_scores_are_added_to_earned_rewards(buffer: Buffer) -> None:
    rows = [trajectory(0, "1", earned=0.25), trajectory(1, "2"), trajectory(2, "1", role="baseline")]
    (group_id,) = generate(buffer, [rows])
    with scoring(buffer, ScoringCore(RewardConfig())) as worker:
        group = collect(buffer, 1)[group_id]
        assert rewards(group) == [1.25, 0.0, 1.0]
        assert group.scored_rows[0].breakdown == {"earned": 0.25, "scorer": 1.0}
        assert [row.trajectory.role for row in group.scored_rows] == ["policy", "policy", "baseline"]
        np.testing.assert_array_equal(group.scored_rows[0].trajectory.segments[0].ids, [1, 2, 3])
        eventually(lambda: worker.figures()["groups_held"] == 0)
    assert worker.figures()["groups_completed"] == 1 and worker.figures()["rows_scored"] == 3


def test_a_scorer_receives_the_number_of_sampled_tokens(buffer: Buffer) -> None:
    (group_id,) = generate(buffer, [answers("1", "two")])  # two sampled tokens each
    config = RewardConfig(scorer="target_length", arguments={"target": 10, "slope": 0.5})
    with scoring(buffer, ScoringCore(config)):
        assert rewards(collect(buffer, 1)[group_id]) == [-4.0, -4.0]


def test_token_rewards_are_kept(buffer: Buffer) -> None:
    """An agent earned 0.25 on its second token and 0.5 in total; the score is added to the total and to no token."""
    earned = (np.array([0.0, 0.25, 0.0], np.float32),)
    rows = [trajectory(0, "1", earned=0.5, token_rewards=earned), *answers("0", "2")[1:]]
    (group_id,) = generate(
        buffer, [[*rows, trajectory(2, "1", earned=0.5, token_rewards=earned, finish_reason="error")]]
    )
    with scoring(buffer, ScoringCore(RewardConfig()), min_scored_samples=2):
        first, second, third = collect(buffer, 1)[group_id].scored_rows
    assert (first.reward, second.reward, third.reward) == (1.5, 0.0, None)
    for row in (first, third):  # also without a score
        assert row.trajectory.token_rewards is not None
        np.testing.assert_array_equal(row.trajectory.token_rewards[0], earned[0])
        assert row.trajectory.earned_reward == 0.5
    assert second.trajectory.token_rewards is None


def test_earned_rewards_are_a_component_of_every_row_of_their_group(buffer: Buffer, tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.toml"
    rubric.write_text('[[components]]\nscorer = "exact"\n[[components]]\nscorer = "numeric"\nweight = 0.5\n')
    ids = generate(buffer, [[trajectory(0, "1", earned=0.25), trajectory(1, "1.0")], answers("1", "2")])
    with scoring(buffer, ScoringCore(RewardConfig(rubric=str(rubric)))):
        groups = collect(buffer, 2)
    assert rewards(groups[ids[0]]) == [1.75, 0.5]
    assert [row.breakdown for row in groups[ids[0]].scored_rows] == [
        {"exact": 1.0, "numeric": 1.0, "earned": 0.25},
        {"exact": 0.0, "numeric": 1.0, "earned": 0.0},
    ]
    assert [row.breakdown for row in groups[ids[1]].scored_rows] == [
        {"exact": 1.0, "numeric": 1.0},
        {"exact": 0.0, "numeric": 0.0},
    ]


@pytest.mark.parametrize(("grouped", "second"), [(False, ["timeout*1"]), (True, ["1", "timeout*1", "2"])])
def test_rows_of_a_grouped_scorer_are_scored_again_together(buffer: Buffer, grouped: bool, second: list[str]) -> None:
    core = ScriptedCore(grouped=grouped)
    (group_id,) = generate(buffer, [[*answers("1", "timeout*1", "2"), trajectory(3, "x", finish_reason="error")]])
    with scoring(buffer, core, min_scored_samples=3):
        assert rewards(collect(buffer, 1)[group_id]) == [1.0, 1.0, 0.0, None]
    assert [[item.solution for item in items] for _, items in core.batches] == [["1", "timeout*1", "2"], second]
    assert {(priority, item.group) for priority, items in core.batches for item in items} == {("ring", group_id)}


def test_spent_attempts_drop_the_group_with_its_reason(buffer: Buffer) -> None:
    core = ScriptedCore()
    generate(
        buffer,
        [answers("1", "timeout*9"), answers("crashed*9", "1"), answers("1", "1"), answers("invalid_input*9", "1")],
    )
    with scoring(buffer, core, max_attempts=2):
        assert len(collect(buffer, 1)) == 1
        eventually(lambda: buffer.counts()["dropped"] == 3)
    counts = buffer.counts()
    assert (counts["dropped:timeout"], counts["dropped:crashed"], counts["dropped:invalid_input"]) == (1, 1, 1)
    assert (
        core.asked.count("timeout*9") == 2 and core.asked.count("invalid_input*9") == 1
    )  # invalid input is not retried


def test_a_group_with_enough_scored_rows_is_completed(buffer: Buffer) -> None:
    ids = generate(buffer, [answers("1", "timeout*9", "2"), answers("1", "crashed*9", "timeout*9")])
    with scoring(buffer, ScriptedCore(), min_scored_samples=2, max_attempts=2):
        group = collect(buffer, 1)[ids[0]]
        eventually(lambda: buffer.counts()["dropped"] == 1)
    assert rewards(group) == [1.0, None, 0.0]
    assert (
        group.scored_rows[1].unscored_reason == "timeout" and group.scored_rows[1].unscored_detail == "scripted timeout"
    )


def with_greedy(policy: list[Trajectory], text: str) -> list[Trajectory]:
    """The rows followed by a greedy answer."""
    return [*policy, trajectory(len(policy), text, role="baseline")]


def test_a_greedy_answer_is_scored_again_and_without_a_score_its_group_is_dropped(buffer: Buffer) -> None:
    again, *_, enough = generate(
        buffer,
        [
            with_greedy(answers("1", "2"), "timeout*1"),
            with_greedy(answers("1", "2"), "crashed*9"),  # all policy rows have a reward
            with_greedy(answers("1", "timeout*9", "timeout*9"), "invalid_input*9"),  # enough of them have a reward
            with_greedy(answers("1", "timeout*9"), "2"),  # the greedy answer does not count among these
        ],
    )
    with scoring(buffer, ScriptedCore(), max_attempts=2, min_scored_samples=1) as worker:
        groups = collect(buffer, 2)
        eventually(lambda: buffer.counts()["dropped"] == 2)
    assert rewards(groups[again]) == [1.0, 0.0, 1.0] and groups[again].scored_rows[2].trajectory.role == "baseline"
    assert rewards(groups[enough]) == [1.0, None, 0.0]
    counts = buffer.counts()
    assert (counts["dropped:crashed"], counts["dropped:invalid_input"]) == (1, 1)
    assert worker.figures()["groups_completed"] == 2


@pytest.mark.usefixtures("short_pauses")
def test_infrastructure_failures_have_their_own_budget(redis_url: str) -> None:
    buffer, core = run_of(redis_url, infrastructure=6, data=2), ScriptedCore()
    texts = ("infrastructure*5", "infrastructure*9", "timeout*9", "timeout*1", "crashed*1")
    kept, *_, others = generate(buffer, [answers(text, "1") for text in texts[:3]] + [answers(*texts[3:], "1")])
    with scoring(buffer, core, max_attempts=2, infrastructure_attempts=6):
        groups = collect(buffer, 2)
        eventually(lambda: buffer.counts()["dropped"] == 2)
    assert rewards(groups[kept]) == [1.0, 1.0] and rewards(groups[others]) == [1.0, 1.0, 1.0]
    assert [core.asked.count(text) for text in texts] == [6, 6, 2, 2, 2]
    assert buffer.counts()["dropped:infrastructure"] == buffer.counts()["dropped:timeout"] == 1
    assert buffer.verify() == []


@pytest.mark.usefixtures("short_pauses")
def test_failures_of_both_kinds_spend_both_budgets(redis_url: str) -> None:
    buffer, core = run_of(redis_url, infrastructure=5, data=2), ScriptedCore()
    (kept, _) = generate(buffer, [answers("infrastructure*4", "timeout*1"), answers("infrastructure*3", "crashed*9")])
    with scoring(buffer, core, max_attempts=2, infrastructure_attempts=5):
        assert rewards(collect(buffer, 1)[kept]) == [1.0, 1.0]
        eventually(lambda: buffer.counts().get("dropped:crashed") == 1)
    assert (core.asked.count("infrastructure*4"), core.asked.count("timeout*1")) == (5, 2)
    assert (core.asked.count("infrastructure*3"), core.asked.count("crashed*9")) == (4, 2), "each as often as it may"
    assert buffer.verify() == []


def test_a_stop_ends_the_pause_and_spends_no_budget(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.reward.pauses.FIRST_PAUSE_SECONDS", 600.0)
    buffer, core = run_of(redis_url, infrastructure=0), ScriptedCore()
    generate(buffer, [answers("infrastructure*1")])
    with scoring(buffer, core):
        eventually(lambda: bool(core.asked))
    counts = buffer.counts()
    assert (counts["generated_waiting"], counts["dropped"]) == (1, 0)
    with scoring(buffer, core):
        collect(buffer, 1)
    assert core.asked == ["infrastructure*1"] * 2


def test_an_answer_that_ended_in_an_error_is_not_scored(buffer: Buffer) -> None:
    core = ScriptedCore()
    rows = [*answers("1", "1"), trajectory(2, "2", finish_reason="error"), trajectory(3, "2", finish_reason="length")]
    (group_id,) = generate(buffer, [rows])
    with scoring(buffer, core, min_scored_samples=2):
        group = collect(buffer, 1)[group_id]
    assert rewards(group) == [1.0, 1.0, None, 0.0] and group.scored_rows[2].unscored_reason == "invalid_input"
    assert len(core.asked) == 3


def test_an_episode_that_may_not_be_repeated_keeps_its_reason(buffer: Buffer) -> None:
    lost = replace(trajectory(2, "2", finish_reason="error"), metadata={"unscored": "its outcome is unknown"})
    (group_id,) = generate(buffer, [[*answers("1", "1"), lost]])
    with scoring(buffer, ScriptedCore(), min_scored_samples=2):
        group = collect(buffer, 1)[group_id]
    row = group.scored_rows[2]
    assert (row.reward, row.unscored_reason, row.unscored_detail) == (None, "infrastructure", "its outcome is unknown")


def test_a_payload_that_cannot_be_read_is_dropped(redis_url: str) -> None:
    buffer = run_of(redis_url, data=0)
    buffer.admit([("0-0", b"")], 1)
    (one,) = claim(buffer, "prompts")
    buffer.complete(one, b"no arrow")
    ids = generate(buffer, [answers("1")])
    with scoring(buffer, ScoringCore(RewardConfig())):
        assert list(collect(buffer, 1)) == ids
        eventually(lambda: buffer.counts().get("dropped:undecodable") == 1)
    assert buffer.verify() == []


def test_groups_claimed_together_with_one_that_cannot_be_read_are_scored(redis_url: str) -> None:
    buffer = run_of(redis_url, data=0)
    buffer.admit([("0-0", b"")], 1)
    (one,) = claim(buffer, "prompts")
    buffer.complete(one, b"no arrow")
    first, _without_trajectories, last = generate(buffer, [answers("1"), [], answers("2")])
    with scoring(buffer, ScoringCore(RewardConfig())):
        assert set(collect(buffer, 2)) == {first, last}
        eventually(lambda: buffer.counts().get("dropped:undecodable") == 2)
    assert buffer.verify() == []


def test_leases_are_renewed_while_a_scorer_is_slow(buffer: Buffer) -> None:
    generate(buffer, [answers(*["slow"] * 8), answers("1")])
    with scoring(buffer, ScriptedCore(), lease_seconds=1.4):  # less than the slow answers take together
        collect(buffer, 2)
    counts = buffer.counts()
    assert counts["leases_expired"] == 0 and counts["stale_results_refused"] == 0 and counts["dropped"] == 0


def test_a_stop_gives_groups_back_unharmed(redis_url: str) -> None:
    buffer = run_of(redis_url, infrastructure=0, data=0)
    generate(buffer, [answers("1", "wait"), answers("1")])
    with scoring(buffer, ScriptedCore()):
        eventually(lambda: buffer.counts()["generated_leased"] > 0)
    counts = buffer.counts()
    assert counts["generated_leased"] == counts["dropped"] == 0
    assert counts["generated_waiting"] + counts["scored_waiting"] == 2
    with scoring(buffer, ScoringCore(RewardConfig())):
        collect(buffer, 2)
    assert buffer.verify() == []


class MeetingCore(ScoringCore):
    """Its first call waits until the other core has one, too."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__(RewardConfig())
        self._both: threading.Barrier | None = both

    def score(self, *arguments: Any, **options: Any) -> list[Score]:
        both, self._both = self._both, None
        if both is not None:
            both.wait(20.0)
        return super().score(*arguments, **options)


def test_replicas_share_the_scoring_of_a_run(buffer: Buffer) -> None:
    both = threading.Barrier(2)
    workers = [ScoringWorker(buffer, MeetingCore(both), RewardConfig(), name) for name in ("reward", "reward-1")]
    with looping(workers[0].run), looping(workers[1].run):
        first = generate(buffer, [answers("1", "2")])
        eventually(lambda: both.n_waiting == 1)
        group_ids = [*first, *generate(buffer, [answers("1", "2")]), *generate(buffer, [answers("1", "2")] * 6)]
        groups = collect(buffer, 8)
        eventually(lambda: sum(worker.figures()["groups_completed"] for worker in workers) == 8)
    assert set(groups) == set(group_ids) and all(rewards(group) == [1.0, 0.0] for group in groups.values())
    assert all(worker.figures()["groups_completed"] > 0 for worker in workers)
    assert all(worker.figures()["groups_waiting_seconds"] > 0 for worker in workers)


def test_a_bug_ends_the_service(buffer: Buffer) -> None:
    generate(buffer, [answers("bug")])
    with pytest.raises(ZeroDivisionError), scoring(buffer, ScriptedCore()):
        eventually(lambda: buffer.counts()["generated_leased"] == 1)


def test_progress_survives_serialization() -> None:
    progress = Progress(2, 1, {0: Scored(0.5, {"a": 1.0}), 3: Unscored("timeout", "10 s")})
    assert Progress.from_bytes(progress.to_bytes()) == progress
    assert Progress.from_bytes(None) == Progress()


@pytest.mark.parametrize(
    ("found", "minimum", "lacking"),
    [("rr", 0, []), ("ru", 0, [1]), ("ru", 1, []), ("uu", 1, [0, 1]), ("ruu", 2, [1, 2])],
)
def test_unscored_rows_that_a_group_needs(found: str, minimum: int, lacking: list[int]) -> None:
    def row(number: int, scored: bool, role: str = "policy") -> ScoredTrajectory:
        return scored_row(trajectory(number, "", role=role), Scored(1.0) if scored else Unscored("timeout"))

    def numbers(rows: list[ScoredTrajectory]) -> list[int]:
        return [one.trajectory.trajectory_id for one in unscored_rows_required(rows, minimum)]

    rows = [row(number, kind == "r") for number, kind in enumerate(found)]
    assert numbers(rows) == lacking
    assert numbers([*rows, row(9, True, "baseline")]) == lacking, "a baseline is no sample"
    assert numbers([*rows, row(9, False, "baseline")]) == [*lacking, 9], "and nothing stands in for it"
