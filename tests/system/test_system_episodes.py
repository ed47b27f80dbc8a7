"""A run whose policy answers an environment in several turns, with real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.services.run.json_files import EVALUATIONS_FILE, GENERATIONS_FOLDER, JsonLines
from tests.support.whole_run import WholeRun

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def test_a_run_trains_on_episodes_and_replays(tmp_path: Path) -> None:
    run = WholeRun(
        tmp_path,
        run={"run_id": "episodes", "total_batches": 4, "groups_per_batch": 4, "staleness_budget": 2},
        rollout={"samples_per_prompt": 4, "stop": tuple(LETTERS)},
        environment={
            "path": "tests.support.environments:Echo",
            "arguments": {"faults": {"a": "once raise"}, "marks": str(tmp_path)},
            "max_turns": 4,
            "max_turn_tokens": 16,
        },
        reward={"scorer": "earned"},
        eval={"sets": [{"name": "held_out", "file": str(tmp_path / "data" / "eval.parquet"), "limit": 6}]},
    )
    run.finish()
    check_evaluations(run)
    rows = run.trained_rows()
    assert len(rows) == 4 * 4 * 4
    turns = [row.trajectory.metadata["num_turns"] for _, row in rows]
    assert max(turns) == 4, "some episodes have as many turns as they may"
    for version, row in rows:
        trajectory = row.trajectory
        (segment,) = trajectory.segments
        begins = np.flatnonzero(np.diff(segment.loss_mask, prepend=0) == 1)
        assert len(begins) == trajectory.metadata["num_turns"]
        assert (segment.behavior_logprobs[segment.loss_mask == 1] < 0).all()
        assert {span.policy_version for span in segment.spans} <= set(range(version))
        rewards = trajectory.token_rewards[0] if trajectory.token_rewards else np.zeros(1)
        assert row.reward == pytest.approx(trajectory.earned_reward) == pytest.approx(float(rewards.sum()))
        assert trajectory.earned_reward == 0.25 * (len(begins) - (trajectory.metadata["stop"] == "length"))
    run.ledger()
    assert run.summary()["groups"]["committed"] == 4 * 4
    replayed = run.tandem("replay", str(run.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "equal" in replayed.stdout


def check_evaluations(run: WholeRun) -> None:
    """The first and the last version played the same episodes, seen from their environments."""
    evaluations = JsonLines(run.folder / EVALUATIONS_FILE).read()
    assert [line["version"] for line in evaluations] == [0, 4]
    seen = []
    for line in evaluations:
        found = line["sets"]["held_out"]
        assert (found["num_scored"], found["failed"]) == (6, "")
        stops = {name: number for name, number in found["episodes"].items() if name.startswith("stop_")}
        assert sum(stops.values()) == 6 and found["episodes"]["num_turns"] >= 6
        rows = JsonLines(run.folder / GENERATIONS_FOLDER / f"{line['version']:06d}" / "held_out.jsonl").read()
        for row in rows:
            episode = row["episode"]
            turns_that_earned = episode["num_turns"] - (episode["stop"] == "length")
            assert row["reward"] == episode["earned_reward"] == 0.25 * turns_that_earned
        seen.append([row["episode"]["messages"][len(row["prompt"])]["content"] for row in rows])
    assert seen[0] == seen[1] and len(set(seen[0])) == 6, "the seeds differ by prompt and not by version"
