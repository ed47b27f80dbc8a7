"""A run whose policy answers an environment in several turns, with real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
    )
    run.finish()
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
